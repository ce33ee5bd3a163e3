"""Rewrites code from fairscale to shardkit; needs libcst."""
