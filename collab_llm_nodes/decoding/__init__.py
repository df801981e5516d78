"""The laws of speculative decoding, in numpy."""
