"""The embedded text models: their grammar, checker, training and evaluation."""
