"""Sparse gradients (``nn.Embedding(sparse=True)``) reduced to their owners as rows and indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..backend import Group
from ..torch_seams.hooks import NO_BACKWARD, BackwardState, GradientHook


def sparse_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Parameters whose gradients come sparse."""
    return {
        m.weight
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and isinstance(m.weight, nn.Parameter)
    }


def begin_only(state: BackwardState) -> GradientHook:
    """A hook for gradients that are reduced at the end of backward."""

    def after(_: torch.Tensor) -> None:
        if state.accumulating:
            state.unreduced = True
        elif state.task == NO_BACKWARD:
            state.begin()

    return after


class SparseReducer:
    """Sends each rank's rows to the owner, who averages them; done at the end of backward."""

    def __init__(
        self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group, state: BackwardState
    ) -> None:
        self._params, self._owners, self._group, self._state = list(params), list(owners), group, state
        self._mean = [False] * len(self._params)

    def hooks(self) -> list[tuple[nn.Parameter, GradientHook | None, GradientHook]]:
        after = begin_only(self._state)
        return [(p, partial(self._make_local, i), after) for i, p in enumerate(self._params)]

    @torch.no_grad()
    def _make_local(self, index: int, _: torch.Tensor | None = None) -> None:
        """A mean gets a local gradient added: multiply it first, as dense ones are."""
        if self._state.asked:
            return
        grad = self._params[index].grad
        if self._mean[index] and grad is not None:
            grad.mul_(self._group.world_size)
        self._mean[index] = False

    def abandon(self) -> None:
        """Nothing is in flight."""

    @torch.no_grad()
    def finish(self) -> None:
        for i, p in enumerate(self._params):
            self._make_local(i)
            self._mean[i] = self._reduce(p, self._owners[i])

    def _reduce(self, param: nn.Parameter, owner: int) -> bool:
        """Leaves the mean with the owner; whether this rank has it now."""
        world, mine = self._group.world_size, self._group.rank == owner
        grad, param.grad = param.grad, None
        dense = grad is not None and not grad.is_sparse
        rows = None if grad is None else (grad.to_sparse(1) if dense else grad).coalesce()
        count = 0 if rows is None else rows._nnz()
        # [W, 3]: rows, whether any gradient, whether dense
        facts = torch.zeros(world * 3, dtype=torch.int64, device=param.device)
        own = facts[self._group.rank * 3 : self._group.rank * 3 + 3]
        own.copy_(torch.tensor([count, int(rows is not None), int(dense)]))
        self._group.all_gather_into(facts, own, label="rows of sparse gradients")
        table = facts.view(world, 3).tolist()
        if not any(used for _, used, _ in table):
            return False
        counts = [row[0] for row in table]
        indices = self._to_owner(
            rows.indices()[0] if rows is not None else param.new_empty(0, dtype=torch.int64), counts, owner, 1
        )
        width = param.numel() // param.shape[0]
        values = self._to_owner(
            rows.values() if rows is not None else param.new_empty(0), counts, owner, width
        )
        if not mine:
            return False
        values = values.view(
            -1, *param.shape[1:]
        )  # said to be right, or torch warns that it does not check them
        total = torch.sparse_coo_tensor(indices[None], values, param.shape, check_invariants=False).coalesce()
        total = torch.sparse_coo_tensor(
            total.indices(), total.values() / world, param.shape, is_coalesced=True, check_invariants=False
        )
        param.grad = total.to_dense() if any(is_dense for _, _, is_dense in table) else total
        return True

    def _to_owner(self, tensor: torch.Tensor, counts: list[int], owner: int, width: int) -> torch.Tensor:
        world, rank = self._group.world_size, self._group.rank
        flat = tensor.contiguous().view(-1)
        receive = [c * width if rank == owner else 0 for c in counts]
        send = [flat.numel() if r == owner else 0 for r in range(world)]
        out = flat.new_empty(sum(receive))
        self._group.all_to_all(out, flat, receive, send, label="sparse gradients")
        return out
