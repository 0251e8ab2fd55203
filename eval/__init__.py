"""Evaluation: perplexity, the paired comparison with the source, KV cache and decoding speed, and the report."""
