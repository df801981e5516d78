"""Calibration of the evidence that a sentence answers a question, and its questions."""
