"""Which two experts compute a token, and how much each counts (GShard, Lepikhin et al., arXiv 2006.16668, algorithm 1).

Legend: S tokens, E experts, C capacity (tokens that an expert takes), M model dimension.

The second expert is drawn, as in fairscale: the largest of the other experts' logits plus Gumbel noise. (GShard takes
the second best one, with a probability that grows with its weight.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigurationError


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        l_aux: 0-dim; small where experts are used evenly. Add it, times a small number, to the loss.
        combine_weights: [S, E, C], differentiable: how much what slot c of expert e holds counts for token s.
        dispatch_mask: [S, E, C], bool: which slot takes which token.
    """

    l_aux: torch.Tensor
    combine_weights: torch.Tensor
    dispatch_mask: torch.Tensor


def gumbel_rsample(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Noise of the standard Gumbel distribution, fp32."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    # unchecked: validation waits for the device
    return torch.distributions.Gumbel(zero, one, validate_args=False).rsample(torch.Size(shape))


def one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """[...] of class numbers -> [..., num_classes] of zeros and ones of the same dtype.

    Raises:
        ConfigurationError: there are no classes.
    """
    if num_classes <= 0:
        raise ConfigurationError(f"num_classes must be a positive integer, got {num_classes}")
    # unlike torch's own, it doesn't wait for the device to check the numbers
    zeros = torch.zeros((*tensor.shape, num_classes), device=tensor.device, dtype=tensor.dtype)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def top2gating(logits: torch.Tensor) -> Routing:
    """Two experts for each token, while these have room; earlier tokens, and first choices, come first.

    A token that finds no room at one expert is computed by the other alone; with none at both its output is zero.

    Args:
        logits: [S, E], floating point. An expert takes C = 2S/E tokens, rounded up.

    Returns:
        :class:`Routing`, weights in the dtype of the logits.

    Raises:
        ConfigurationError: no matrix of logits, or no tokens.
    """
    if logits.dim() != 2 or 0 in logits.shape:
        raise ConfigurationError(
            f"logits have shape {tuple(logits.shape)}; expected [tokens, experts] with at least one of each"
        )
    tokens, experts = logits.shape
    capacity = -(-2 * tokens // experts)
    gates = F.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))

    first = one_hot(gates.argmax(dim=1), experts)  # [S, E]
    noisy = logits + gumbel_rsample(tuple(logits.shape), logits.device)
    second = one_hot(noisy.masked_fill(first.bool(), float("-inf")).argmax(dim=1), experts)

    # the slot of each token at its expert: as many as came before it
    first_slot = first.cumsum(dim=0) - 1
    second_slot = second.cumsum(dim=0) - 1 + first.sum(dim=0, keepdim=True)

    l_aux = (gates.mean(dim=0) * first.to(gates.dtype).mean(dim=0)).mean()

    first, second = first * (first_slot < capacity), second * (second_slot < capacity)
    first_weight, second_weight = gates * first, gates * second  # [S, E]
    total = first_weight.sum(dim=1) + second_weight.sum(dim=1)
    total = total.clamp(min=torch.finfo(total.dtype).eps).unsqueeze(-1)

    def placed(weight: torch.Tensor, slot: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        where = one_hot((slot * mask).sum(dim=1), capacity)  # [S, C]
        return (weight / total).unsqueeze(2) * where.unsqueeze(1)

    combine = placed(first_weight, first_slot, first) + placed(second_weight, second_slot, second)
    return Routing(l_aux.to(logits.dtype), combine.to(logits.dtype), combine.bool())


class Top2Gate(nn.Module):
    """A linear layer whose outputs choose the experts, see :func:`top2gating`.

    ::

        l_aux, combine_weights, dispatch_mask = Top2Gate(model_dim, num_experts)(tokens)

    Args:
        model_dim: M.
        num_experts: E, of all ranks together.
    """

    wg: nn.Linear

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)

    def forward(self, input: torch.Tensor) -> Routing:
        """[S, M] -> :class:`Routing`."""
        return top2gating(self.wg(input))
