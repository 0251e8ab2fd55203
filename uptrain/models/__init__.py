"""The models of a run: student, teacher, and the trained checkpoint."""
