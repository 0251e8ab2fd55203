"""Uptraining: continue the pretraining of a converted checkpoint on a small share of its budget (Ainslie et al. 2023, §2.2)."""
