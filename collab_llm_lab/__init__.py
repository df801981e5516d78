"""The laboratory: benchmarks, trainings, measurements and the demo. Robots do without it."""
