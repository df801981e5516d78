"""Edge-cloud speculative decoding with early exits (paper 003): machines, wire, service."""
