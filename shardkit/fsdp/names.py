"""Names of modules inside of wrappers, and what wrapping adds to them (fairscale's, so that checkpoints agree)."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"
INNER = "_fsdp_wrapped_module._fpw_module."
OUTER = "_fsdp_wrapped_module."


def clean(name: str) -> str:
    """A name without what wrapping added to it."""
    return ".".join(part for part in name.split(".") if part not in ("_fsdp_wrapped_module", "_fpw_module"))
