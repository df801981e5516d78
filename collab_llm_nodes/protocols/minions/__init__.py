"""Minion and MinionS (paper 000): a small local model reads, a large remote model reasons."""
