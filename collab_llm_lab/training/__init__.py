"""Training and evaluation of the embedded models: one loop, a folder for each family."""
