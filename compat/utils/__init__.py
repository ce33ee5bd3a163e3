"""fairscale.utils: the paths of fairscale up to 0.4.6; see shardkit.fair_dev and shardkit.internal."""
