"""Cost of a run before it starts."""
