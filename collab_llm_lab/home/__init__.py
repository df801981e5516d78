"""A world like a home, its expert, its language, and the training of the pair that lives in it."""
