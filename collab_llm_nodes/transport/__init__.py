"""Skeletons of gRPC servers and clients: streams, TLS, admission, heartbeat, metrics, logs."""
