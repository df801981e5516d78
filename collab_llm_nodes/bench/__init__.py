"""Benchmarks and their plots."""
