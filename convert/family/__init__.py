"""What is known of a model type: where its attention lies on disk, and what may be changed in it."""
