"""Language and expert of the simulated home, which the embedded pair lives in."""
