"""Tools over the core, and their command line :mod:`.cli`; the core imports none of them."""
