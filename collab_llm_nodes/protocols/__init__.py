"""The protocols by which a small and a large model answer together, one folder each."""
