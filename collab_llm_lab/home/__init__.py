"""Language and expert of the simulated home, and the training of the pair that lives in it."""
