"""The dashboard: a web page that shows the robot, with an emergency stop."""
