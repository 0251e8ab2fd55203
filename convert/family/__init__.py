"""Find where a model type keeps its attention on disk, and what may change there."""
