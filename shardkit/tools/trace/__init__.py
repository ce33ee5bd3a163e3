"""Explains traces: where steps lose time, which rank is late, and what to change."""
