"""fairscale.experimental.wgit."""
