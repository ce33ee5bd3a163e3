"""A small vision transformer on real handwritten digits: ``python -m shardkit.examples.digits --help``.

The training loop is in :mod:`.train`; what differs between DDP, OSS, ShardedDDP and FSDP is its
function ``wrap``.
"""
