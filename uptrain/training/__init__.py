"""The training run: opened and checked, put on its devices, and trained step by step."""
