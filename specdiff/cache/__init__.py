"""The shared KV manager: per-row caches for targets, and what tells which cache a model needs."""
