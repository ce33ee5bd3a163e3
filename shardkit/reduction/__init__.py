"""Gradients that are spread over ranks: their norms, and what torch sees of them."""
