"""Device families: each module implements :class:`shardkit.backend.Backend` and is loaded by name."""
