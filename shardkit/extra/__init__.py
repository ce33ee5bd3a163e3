"""What the core does not need: layers and methods that came with fairscale."""
