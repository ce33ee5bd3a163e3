"""Programs in the manner of projects that were written for fairscale; only their imports name shardkit."""
