"""Looks at machines before a job does: ``shardkit doctor``."""
