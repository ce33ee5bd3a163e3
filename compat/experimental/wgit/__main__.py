"""``python -m shardkit.experimental.wgit``: says what to use instead."""

from shardkit.compat.redirected import redirected_names

if __name__ == "__main__":
    redirected_names("shardkit.experimental.wgit.cli")("main")()
