"""Uptraining: go on pretraining a converted checkpoint for a small share of its budget (Ainslie et al. 2023, §2.2)."""
