"""The cloud side: the gRPC verifier service and its client."""
