"""Metrics, trackers and held-out text."""
