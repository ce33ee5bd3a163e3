"""A folder that holds a distributed checkpoint: torch's ``.metadata``, data files, ``shardkit.json``."""
