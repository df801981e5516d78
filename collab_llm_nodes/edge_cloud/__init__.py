"""Paper 003: the edge-cloud session protocol as state machines without I/O."""
