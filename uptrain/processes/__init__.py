"""Processes of a run: how they start, on which devices they run, and how they stop."""
