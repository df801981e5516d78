"""The dashboard: what the robot sees, thinks and does, as a web page, and an emergency stop."""
