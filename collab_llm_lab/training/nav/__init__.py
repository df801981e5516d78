"""The embedded navigation pair: its pictures, its training and its evaluation."""
