"""Training of the pair that lives in the home: pictures, batches, stages, evaluation."""
