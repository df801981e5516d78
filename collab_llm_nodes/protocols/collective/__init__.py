"""Collective adaptive speculation: several draft models vote, one target verifies (paper 002)."""
