"""Pages that are run: what a reader copies from them works."""
