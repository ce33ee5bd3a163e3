"""An order between parts of a backward that share no tensor: ``fairscale.nn.pipe.dependency`` and ``.phony``.

From torchgpipe (Kim et al. 2020, arXiv 2004.09910), section 3.1: an edge of autograd's graph that carries an empty
tensor. ``x, phony = fork(x)`` and later ``y = join(y, phony)``: backward finishes with y before it comes to x.
"""

from __future__ import annotations

import functools

import torch
from torch.autograd.function import FunctionCtx


@functools.cache
def get_phony(device: torch.device, *, requires_grad: bool) -> torch.Tensor:
    """An empty tensor, shape [0], which costs no memory; the same one for the same arguments."""
    return torch.empty(0, device=device, requires_grad=requires_grad)


def fork(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input, and a phony that comes from the same place of autograd's graph."""
    if torch.is_grad_enabled() and input.requires_grad:
        return Fork.apply(input)  # type: ignore[no-any-return, no-untyped-call]
    return input, get_phony(input.device, requires_grad=False)


def join(input: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:
    """The input, whose backward comes before that of the phony's origin."""
    if torch.is_grad_enabled() and (input.requires_grad or phony.requires_grad):
        return Join.apply(input, phony)  # type: ignore[no-any-return, no-untyped-call]
    return input


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return input.detach(), get_phony(input.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_input: torch.Tensor, grad_grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad_input


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, input: torch.Tensor, phony: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return input.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_input: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad_input, None
