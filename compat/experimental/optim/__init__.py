"""fairscale.experimental.optim."""
