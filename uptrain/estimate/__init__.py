"""The length and the cost of a run, before it starts."""
