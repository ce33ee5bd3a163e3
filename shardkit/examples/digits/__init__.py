"""A small vision transformer on real handwritten digits: ``python -m shardkit.examples.digits --help``.

The training loop is in :mod:`shardkit.examples.loop`; what differs between DDP, OSS, ShardedDDP and FSDP is the
function ``wrap`` of :mod:`.train`.
"""
