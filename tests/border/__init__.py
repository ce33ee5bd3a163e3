"""What users of torch do with a model and an optimizer, tried with each strategy and number of ranks."""
