"""DRAGON (paper 001): two sides, each with documents of its own, write one answer."""
