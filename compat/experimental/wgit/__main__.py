"""``python -m shardkit.experimental.wgit``: says what to use instead."""

from .cli import main

if __name__ == "__main__":
    main()
