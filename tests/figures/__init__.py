"""Counted figures of a training step: operations, Python calls, bytes sent and bytes held."""
