"""collab_llm: edge-cloud collaborative decoding for ROS 2 robots."""
