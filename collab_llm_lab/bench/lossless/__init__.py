"""The check that an answer is exactly the target's."""
