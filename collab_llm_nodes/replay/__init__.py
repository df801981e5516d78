"""Recorded drives: bags written, read, mended, and answered anew to see what differs."""
