"""Device families: each is a subclass of :class:`shardkit.backend.Backend` that is loaded by name."""
