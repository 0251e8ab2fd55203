"""Measurements beside perplexity, and their intervals."""
