"""Uptraining: continue the pretraining for a small share of its budget (Ainslie et al. 2023, §2.2)."""
