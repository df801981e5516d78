"""Benchmarks of DRAGON (paper 001)."""
