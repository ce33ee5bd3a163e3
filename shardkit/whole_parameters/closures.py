"""Steps whose optimizer evaluates the model itself, as often as it likes (LBFGS).

All of its parameters have one owner, the leader, which runs the optimizer. The other ranks do what it asks for: take
the values that it tries, evaluate the closure with it, and send gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..backend import Group, ReduceOp
from ..types import Tree

_EVALUATE, _DONE = 1, 0


class Led:
    """One step that a leader runs.

    Args:
        group: the ranks; None if there is one.
        leader: the rank that runs the optimizer; None: every rank does, with the same numbers.
        replicas: ranks that hold the same shards; they follow leaders of their own, which see the same losses.
        to_leader: brings values and gradients to it (collective).
        to_shards: brings values back (collective).
        closure: evaluates the model.
    """

    def __init__(
        self,
        group: Group | None,
        leader: int | None,
        replicas: Sequence[Group],
        to_leader: Callable[[], None],
        to_shards: Callable[[], None],
        closure: Callable[[], Tree],
    ) -> None:
        self._group = None if group is None else group.channel("control")
        self._leader, self._replicas = leader, replicas
        self._to_leader, self._to_shards, self._closure = to_leader, to_shards, closure
        self._first: Tree = None
        self._evaluations = 0

    def lead(self, step: Callable[[Callable[[], Tree]], Tree]) -> Tree:
        """Runs the optimizer's step on the leader."""
        self._to_leader()
        loss = step(self._evaluated)
        self._tell(_DONE)
        self._to_shards()
        return loss

    def follow(self) -> Tree:
        """Does what the leader asks for, until it is through; the loss of the first evaluation."""
        self._to_leader()
        while self._tell(_EVALUATE) == _EVALUATE:
            self._evaluate()
        self._to_shards()
        return self._first

    def _tell(self, what: int) -> int:
        if self._leader is None or self._group is None:
            return what
        return self._group.broadcast_object(what, self._leader, label="whether the optimizer evaluates again")

    def _evaluated(self) -> Tree:
        self._tell(_EVALUATE)
        return self._evaluate()

    def _evaluate(self) -> Tree:
        self._to_shards()
        with torch.enable_grad():
            loss = self._closure()
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().clone()
            for group in (self._group, *self._replicas):
                if group is None:
                    continue
                group.all_reduce(loss, op=ReduceOp.AVG, label="loss of the closure")
        self._to_leader()
        if not self._evaluations:
            self._first = loss
        self._evaluations += 1
        return loss
