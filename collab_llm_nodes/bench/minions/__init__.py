"""Benchmark of Minion, MinionS and their baselines on long robot logs."""
