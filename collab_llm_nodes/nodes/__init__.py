"""The ROS 2 nodes: the only place where rclpy is imported."""
