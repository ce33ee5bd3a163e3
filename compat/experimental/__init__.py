"""fairscale.experimental: nothing is imported here, as in fairscale; no promise of stability either."""
