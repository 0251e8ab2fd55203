"""Fit each converted attention block to the source on calibration text, layer by layer."""
