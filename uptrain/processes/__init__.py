"""Launching and coordinating the processes of a run."""
