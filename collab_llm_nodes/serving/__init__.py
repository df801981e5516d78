"""One model, many callers: batching, KV caches on loan, pictures decoded apart."""
