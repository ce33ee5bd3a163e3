"""A small vision transformer on real handwritten digits: ``python -m shardkit.examples.digits --help``.

The training loop is in :mod:`.train`; what differs between DDP, OSS and ShardedDDP is its function ``wrap``.
"""
