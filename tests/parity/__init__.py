"""fairscale's public surface as facts, shardkit's held to it, and the report of where they part."""
