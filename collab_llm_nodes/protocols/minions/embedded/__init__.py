"""The embedded remote, which plans questions about a robot's logs without a large model."""
