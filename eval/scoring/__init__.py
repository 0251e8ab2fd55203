"""Score text with models, window by window."""
