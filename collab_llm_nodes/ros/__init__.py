"""Parts that the ROS 2 nodes share: managed base, endpoints, health, messages, clients."""
