"""What ranks tell each other, and compare before it matters."""
