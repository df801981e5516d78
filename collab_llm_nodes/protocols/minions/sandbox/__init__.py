"""Capability sandbox in which the remote model's programs run."""
