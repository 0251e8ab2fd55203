"""Text as batches: packed, mixed, and shared out over processes."""
