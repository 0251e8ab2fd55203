"""Merge KV heads. Refuse checkpoints that cannot be converted correctly."""
