"""fairscale.fair_dev: helpers for tests."""
