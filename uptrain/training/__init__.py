"""The training run: opened, prepared, and stepped through."""
