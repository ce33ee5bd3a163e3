"""How torch_xla's FSDP names shards in state dicts.

A shard is an entry of its wrapper. Its name holds the path that the parameter has within the wrapper, with another
separator. Paths of modules are without ``_fpw_module`` in state dicts, but with it inside of such names.
"""

from __future__ import annotations

from shardkit.fsdp.names import INNER, OUTER

PREFIX = "_fsdp_shard"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


def shard_name(original: str) -> str:
    """Name of the shard of a parameter with this path."""
    return f"{PREFIX}.{original}".replace(".", SEPARATOR)


def flat_original(index: int) -> str:
    """Path of a flat parameter within its wrapper."""
    return f"{OUTER}flat_param_{index}"


def own_original(name: str) -> str:
    """Path of a parameter, not flattened, that has this name in the wrapped module."""
    return f"{INNER}{name}"


def is_flat(original: str) -> bool:
    """Whether this is the path of a flat parameter."""
    return original.startswith(f"{OUTER}flat_param_")


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
