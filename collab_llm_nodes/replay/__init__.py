"""Recorded drives: bags written, read, mended, and answered again to see what differs."""
