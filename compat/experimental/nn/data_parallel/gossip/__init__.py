"""fairscale.experimental.nn.data_parallel.gossip."""
