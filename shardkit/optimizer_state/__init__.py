"""State of optimizers over shards: as named boxes, gathered, cut, and in the forms of state dicts."""
