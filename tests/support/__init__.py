"""Which features were tested on which backends, with how many ranks, on which torch: docs/SUPPORT.md."""
