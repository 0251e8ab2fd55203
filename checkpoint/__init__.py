"""Find, read and write Hugging Face checkpoints: layout first, weights only when they are needed."""
