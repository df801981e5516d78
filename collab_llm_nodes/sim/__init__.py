"""MuJoCo rooms and the simulated Go2."""
