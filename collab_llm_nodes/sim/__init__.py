"""A simulated home: rooms with furniture, the camera, and the Go2 that walks there."""
