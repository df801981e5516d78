"""Data generation, trainers and evaluation of the embedded pair."""
