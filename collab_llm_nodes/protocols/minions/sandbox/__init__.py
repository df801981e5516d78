"""The capability sandbox in which the remote model's programs run, and nothing else of it."""
