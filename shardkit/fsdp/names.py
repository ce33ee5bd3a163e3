"""Names of modules inside of wrappers, and what wrapping adds to them (fairscale's, so that checkpoints agree)."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"
INNER = "_fsdp_wrapped_module._fpw_module."
OUTER = "_fsdp_wrapped_module."
_OTHERS = ("_checkpoint_wrapped_module", "_orig_mod")  # of torch's wrappers, which state dicts leave out


def clean(name: str) -> str:
    """A name without what wrapping added to it."""
    return ".".join(part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_fpw_module"))


def plain_name(name: str) -> str:
    """A name without what wrapping, here and in torch, added to it."""
    return ".".join(part for part in clean(name).split(".") if part not in _OTHERS)
