"""Calibration text and the statistics that methods take from it."""
