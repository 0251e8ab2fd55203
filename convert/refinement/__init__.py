"""Refinement: fit converted attention layers to the source on calibration text, before any uptraining.

Shape letters: B sequences (of a batch or of the whole text), T tokens of a sequence, C hidden width.
"""
