"""Mixture of experts: each token is computed by two of many experts, which live on different ranks.

GShard, Lepikhin et al., arXiv 2006.16668, algorithms 1 and 2. The second expert is drawn, as in fairscale: the largest
of the other experts' logits plus Gumbel noise. (GShard takes the second best one, with a probability that grows with
its weight.)

Legend: W ranks, L experts of a rank, E = W * L experts, S tokens of a rank, C capacity (tokens that an expert takes), M
model dimension.

[Note: gradients of experts] An expert computes tokens of all ranks, so that its gradient is the sum over the ranks'
losses already; the gate and all else have those of the rank's own loss. Where the loss is the mean over ranks,
gradients of other parameters are averaged, and those of experts divided by W and left where they are: no two ranks
hold the same.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..backend import Backend, Group, backend_for, not_compiled
from ..checks import check_same_everywhere
from ..errors import ConfigurationError
from ..types import Context, ProcessGroup

__all__ = ["MOELayer", "Top2Gate", "top2gating"]


class Routing(NamedTuple):
    """Says where tokens go.

    Attributes:
        l_aux: 0-dim; small where experts are used evenly. Add it, times a small number, to the loss.
        combine_weights: [S, E, C], differentiable: how much what slot c of expert e holds counts for token s.
        dispatch_mask: [S, E, C], bool: which slot takes which token.
    """

    l_aux: torch.Tensor
    combine_weights: torch.Tensor
    dispatch_mask: torch.Tensor


def gumbel_rsample(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns noise of the standard Gumbel distribution, fp32."""
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
    """Chooses two experts for each token, while these have room; earlier tokens, and first choices, come first.

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


class _ExchangeContext(Context):
    group: Group


class AllToAll(torch.autograd.Function):
    """``apply(group, tensor)``: [W * n, ...] -> the same shape; the r-th part goes to rank r, the r-th came from it."""

    @staticmethod
    def forward(ctx: _ExchangeContext, group: Group, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        group.all_to_all(received.view(-1), sent.view(-1), label="tokens of experts")
        return received

    @staticmethod
    def backward(ctx: _ExchangeContext, grad_output: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, AllToAll.apply(ctx.group, grad_output)


class MOELayer(nn.Module):
    """Sends each token to the experts that the gate chooses, wherever they are, and adds up what comes back.

    ::

        layer = MOELayer(Top2Gate(model_dim, num_experts), expert)
        output = layer(input)
        loss = task_loss(output) + 0.01 * layer.l_aux

    Every rank of the group calls it, with inputs of the same shape. Expert l of rank r is the gate's number r * L + l.

    Args:
        gate: [S, M] -> (l_aux, combine_weights [S, E, C], dispatch_mask [S, E, C]).
        experts: this rank's: a module, or a ModuleList of L. Each maps [W, 1, C, M] to the same shape.
        group: ranks that hold the experts; None for all.
        backend: name or instance of the backend; by default that of the input's device.

    Attributes:
        l_aux: of the last forward.

    Raises:
        ConfigurationError: there is no process group, or no expert.
    """

    l_aux: torch.Tensor

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        group: ProcessGroup = None,
        *,
        backend: str | Backend | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts if type(experts) is nn.ModuleList else nn.ModuleList([experts])
        if not len(self.experts):
            raise ConfigurationError("experts is an empty ModuleList; each rank needs at least one expert")
        self.group = group
        self._backend = backend
        self._agreed: tuple[object, ...] | None = None  # what ranks last compared
        self.world_size = self._group_of(next(self.parameters(), torch.empty(0))).world_size
        self.num_local_experts = len(self.experts)

    def _group_of(self, tensor: torch.Tensor) -> Group:
        return backend_for([tensor], self._backend).group(self.group)

    def forward(self, *input: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """[any, any, M] -> the same shape: for each token the weighted sum of its experts' outputs.

        Raises:
            ConfigurationError: no single 3-D input; the gate has another number of experts than the ranks hold.
            RankMismatchError: ranks got other numbers of tokens, or dtypes; raised on all ranks. (If only some ranks'
                inputs have changed since the last call: OutOfStepError.)
        """
        if len(input) != 1 or input[0].dim() != 3:
            raise ConfigurationError(
                f"expected one input of shape [sequence, token, model], got {[tuple(x.shape) for x in input]}"
            )
        tokens = input[0].reshape(-1, input[0].shape[-1])  # [S, M]
        self.l_aux, combine_weights, dispatch_mask = self.gate(tokens)
        group = self._group_of(tokens)
        dispatched = torch.einsum("sec,sm->ecm", dispatch_mask.to(tokens.dtype), tokens)  # [E, C, M]
        self._check(tokens, dispatched, group)
        arrived = exchange(group, dispatched).view(
            self.world_size, self.num_local_experts, -1, tokens.shape[1]
        )
        parts = arrived.chunk(self.num_local_experts, dim=1)
        outputs = [expert(part) for part, expert in zip(parts, self.experts, strict=True)]
        for part, output in zip(parts, outputs, strict=True):
            if output.shape != part.shape:
                raise ConfigurationError(
                    f"an expert on rank {group.rank} turned {tuple(part.shape)} into {tuple(output.shape)}; experts "
                    "have to keep the shape"
                )
        returned = exchange(group, torch.cat(outputs, dim=1))  # [W, L, C, M]
        combined = torch.einsum("sec,ecm->sm", combine_weights.to(returned.dtype), returned.flatten(0, 1))
        return combined.view(input[0].shape)

    @not_compiled
    def _check(self, tokens: torch.Tensor, dispatched: torch.Tensor, group: Group) -> None:
        """Compares with the other ranks what was not compared before: sizes that differ would mix up tokens."""
        facts = (tuple(tokens.shape), self.num_local_experts, tuple(dispatched.shape), str(dispatched.dtype))
        if facts == self._agreed:
            return
        names = ("[tokens, model]", "experts of a rank", "[experts, capacity, model]", "dtype")
        what = (
            "inputs of a mixture of experts (all ranks need equally many tokens; pad where there are fewer)"
        )
        check_same_everywhere(group, list(zip(names, facts, strict=True)), what)
        experts = self.world_size * self.num_local_experts
        if dispatched.shape[0] != experts:
            raise ConfigurationError(
                f"the gate chooses among {dispatched.shape[0]} experts, but {self.world_size} ranks with "
                f"{self.num_local_experts} experts each hold {experts}; make the gate for that many"
            )
        self._agreed = facts

    def __deepcopy__(self, memo: dict[int, object]) -> MOELayer:
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            if name == "l_aux":
                value = value.detach()  # part of a graph
            # process groups can't be copied
            vars(made)[name] = value if name in ("group", "_backend") else copy.deepcopy(value, memo)
        return made


@not_compiled
def exchange(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Exchanges parts with all ranks, in a channel of its own, whatever reduces gradients meanwhile."""
    if group.world_size == 1:
        return tensor
    return AllToAll.apply(group.channel("experts"), tensor)
