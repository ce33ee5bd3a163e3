"""torch_xla.distributed.fsdp.utils: activation checkpointing of a module; what is not here is torch_xla's own."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.internal.params import pack_kwargs, unpack_kwargs
from shardkit.types import Tree
from shardkit.wrapping.activations import checkpoint_wrapper
from shardkit.xla.ranks import names_of

__getattr__ = names_of("torch_xla.distributed.fsdp.utils")


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Makes calls of this module keep their inputs only; backward computes the activations again.

    On XLA devices through torch_xla's checkpoint, whose barriers keep the compiler from merging both computations;
    elsewhere through :func:`shardkit.wrapping.activations.checkpoint_wrapper`.

    Returns:
        The same module, with a ``forward`` of its own.

    Raises:
        ConfigurationError: ``module`` is no module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"checkpoint_module takes a module, got a {type(module).__name__}")
    plain = module.forward
    elsewhere = checkpoint_wrapper(module).forward

    def forward(*args: Tree, **kwargs: Tree) -> Tree:
        names, values = pack_kwargs(*args, **kwargs)
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        if not any(t.device.type == "xla" for t in tensors):
            return elsewhere(*args, **kwargs)
        if not any(t.requires_grad for t in tensors) or not torch.is_grad_enabled():
            return plain(*args, **kwargs)  # backward would not come by: torch_xla's goes by inputs
        from torch_xla.utils.checkpoint import checkpoint

        def call(*values: Tree) -> Tree:
            positional, named = unpack_kwargs(names, values)
            return plain(*positional, **named)

        return checkpoint(call, *values)  # which takes no keywords

    module.forward = forward
    return module
