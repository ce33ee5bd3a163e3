"""fairscale.experimental.tooling."""
