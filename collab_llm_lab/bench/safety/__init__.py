"""Stop latencies under faults, the graph's use of the machine, and a soak: ``bench safety``."""
