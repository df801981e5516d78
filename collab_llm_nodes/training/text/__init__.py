"""The embedded text family: its language, its data and its training."""
