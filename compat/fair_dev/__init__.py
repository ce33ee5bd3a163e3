"""fairscale.fair_dev: helpers for tests."""

DATASET_CACHE_ROOT = "cached_datasets"
