"""The Unitree Go2: its Sport API as a state machine."""
