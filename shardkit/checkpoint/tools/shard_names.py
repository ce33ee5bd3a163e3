"""How shards are named in state dicts (as torch_xla's FSDP names them).

A shard is an entry of its wrapper. Its name holds the path that the parameter has within the wrapper, with another
separator. Paths of modules are without ``_fpw_module`` in state dicts, but with it inside of such names.
"""

from __future__ import annotations

from ...fsdp.names import OUTER

PREFIX = "_fsdp_shard"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
FLAT = f"{OUTER}flat_param_"  # so begin the paths of flat parameters


def shard_name(original: str) -> str:
    """Name of the shard of a parameter with this path."""
    return f"{PREFIX}.{original}".replace(".", SEPARATOR)


def in_state_dict(path: str) -> str:
    """A path of a module or parameter as state dicts write it."""
    return path.replace("_fpw_module.", "")


def split_shard_name(key: str) -> tuple[str, str | None]:
    """Path of the wrapper and name of the shard, for a key of a state dict; no name if it is of no shard."""
    parts = key.split(".")
    for index, part in enumerate(parts):
        if part.startswith(PREFIX):
            return ".".join(parts[:index]), ".".join(parts[index:])
    return key, None
