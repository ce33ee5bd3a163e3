"""fairscale.experimental.nn."""
