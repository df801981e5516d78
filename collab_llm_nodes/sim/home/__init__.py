"""A world like a home: rooms with furniture, what the camera sees there, and its pictures."""
