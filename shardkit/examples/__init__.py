"""Runnable examples; ``python -m shardkit.examples.digits --help`` is the first one to try."""
