"""Ranks that lose each other: what each of them hears, and after how long."""
