"""The demo: :mod:`shardkit.examples.digits`. More programs are in the folder ``examples/`` of the repository."""
