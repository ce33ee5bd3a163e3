"""Rewrites code from fairscale to shardkit."""
