"""Times implementations against each other, interleaved within one run."""
