"""Where torch has to be told, or asked, what it has no public word for: hooks, tracers, callers, classes of tensors."""
