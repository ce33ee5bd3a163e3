"""fairscale.fair_dev.common_paths: where tests keep data sets."""

DATASET_CACHE_ROOT = "cached_datasets"
