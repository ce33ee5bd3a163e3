"""Drawn programs, run with shardkit, with the real fairscale and in one process, and compared."""
