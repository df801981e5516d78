"""The embedded remote: plans for questions about a robot's logs, without a large model."""
