"""Calibration: the text that methods may read, and the statistics that they take from it.

Shape letters: B sequences (of a batch or of the whole text), T tokens of a sequence, S tokens that an encoder reads,
N tokens taken out of their sequences; C hidden width, E = C + 1, the input with a constant 1 last.
"""
