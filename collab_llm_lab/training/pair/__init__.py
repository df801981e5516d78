"""Training for models of any pair: the target's own answers, and what is learnt from them."""
