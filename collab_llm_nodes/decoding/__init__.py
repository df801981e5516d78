"""The laws of speculative decoding and the engine that runs a model."""
