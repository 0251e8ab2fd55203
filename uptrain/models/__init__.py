"""Models of a run: the student, its teacher, and the trained checkpoint."""
