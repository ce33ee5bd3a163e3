"""A batch that is too large for one rank is skipped by all."""
