"""Sessions over a model: batched passes, KV caches, early exits, trees."""
