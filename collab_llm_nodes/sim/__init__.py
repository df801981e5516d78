"""A simulated home: rooms with furniture, what the camera sees there, and a Go2 that walks in it."""
