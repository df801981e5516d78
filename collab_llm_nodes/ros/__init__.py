"""What the ROS 2 nodes share: managed base, endpoints, health, message conversion, clients."""
