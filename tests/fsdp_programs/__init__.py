"""Training programs for FullyShardedDataParallel as data, and their runs: plain, with fairscale, with shardkit."""
