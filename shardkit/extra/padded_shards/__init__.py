"""State dicts in which each rank has its own shards, padded or cut in rows, and metadata to put them together again."""
