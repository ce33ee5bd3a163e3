"""Rules for any torch optimizer over sharded parameters, whoever shards them."""
