"""Training of the embedded worker and planner of Minion and MinionS, from seeds."""
