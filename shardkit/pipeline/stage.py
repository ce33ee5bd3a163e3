"""One rank's stage of a pipeline over the ranks of a group, and its messages to its neighbours.

A message is a short text that says what comes, then tensors. They travel as bytes, so that every dtype does. What can't
be sent from its device (gloo and CUDA) goes through host memory.

[Note: two passes] Forward: each micro-batch is received from the rank before, goes through this rank's layers and is
sent on. Backward: its gradients come back from the rank after, in the order in which that rank finishes them (the last
one first), and what they become is sent on to the rank before. On the last rank autograd itself runs backward, when the
user's loss does, and a hook sends the gradients. This is GPipe's order (arXiv 1811.06965), as fairscale's AsyncPipe has
it: the loss is known only after all of forward, so that backward can't begin earlier.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigurationError, LifecycleError, RankLostError, RankMismatchError
from ..types import StateDict
from .batch_norm import expect_micro_batches
from .microbatch import Value
from .schedule import checkpointed_cells, run_cell

_HEADER_BYTES = 1024


class NeighbourLink:
    """This rank's connections to the other ranks of a group.

    Args:
        group: a torch.distributed group.
        device: where received tensors are wanted.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        served = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
        direct = served.get(device.type, "gloo") != "gloo"
        self._wire = device if direct else torch.device("cpu")
        self.failed: set[int] = set()  # ranks that said so
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []  # works, and the bytes they read

    def send(self, dst: int, facts: StateDict, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Sends to a rank of the group, without waiting.

        Args:
            facts: what JSON can hold, some hundred bytes.
        """
        shapes = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        text = json.dumps({**facts, "tensors": shapes}).encode()
        if len(text) > _HEADER_BYTES:
            raise ConfigurationError(
                f"rank {self._group.rank()}: {len(tensors)} tensors are too many for one message between stages "
                f"(their shapes take {len(text)} bytes, {_HEADER_BYTES} are allowed); send fewer"
            )
        header = torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        self._send(dst, header.to(self._wire))
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.detach().to(self._wire).contiguous().view(-1)
                self._send(dst, flat.view(torch.uint8))

    def _send(self, dst: int, data: torch.Tensor) -> None:
        work = dist.isend(data, group=self._group, group_dst=dst)
        if work is not None:  # this rank is in the group
            self._sending.append((work, data))

    def flush(self, seconds: float | None = None) -> None:
        """Waits for what is being sent; raises RuntimeError if that takes longer than the seconds given."""
        limit = () if seconds is None else (datetime.timedelta(seconds=seconds),)
        while self._sending:
            self._sending.pop(0)[0].wait(*limit)

    def drop(self) -> None:
        """Forgets what is being sent."""
        self._sending.clear()

    def receive(self, src: int) -> tuple[StateDict, list[torch.Tensor]]:
        """Receives a message of a rank of the group: facts and tensors.

        Raises:
            RankLostError: the other rank says that it failed.
        """
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device=self._wire)
        dist.recv(header, group=self._group, group_src=src)
        facts = json.loads(bytes(header.tolist()))
        if "error" in facts:
            self.failed.add(src)
            raise RankLostError(facts["error"])
        tensors = []
        for name, shape in facts.pop("tensors"):
            tensor = torch.empty(shape, dtype=getattr(torch, name), device=self._wire)
            if tensor.numel():
                dist.recv(tensor.view(-1).view(torch.uint8), group=self._group, group_src=src)
            tensors.append(tensor.to(self._device))
        return facts, tensors


_PATIENCE_SECONDS = 10.0  # for neighbours to hear of an error


class Stage:
    """This rank's layers, and the ranks before and after it.

    Args:
        layers: this rank's.
        link: to the other ranks.
        index: which stage of how many this is; its rank in the group.
        checkpoint: which micro-batches keep no activations: "always", "except_last", "never".
    """

    def __init__(
        self, layers: nn.Sequential, link: NeighbourLink, index: int, stages: int, checkpoint: str
    ) -> None:
        self._layers = layers
        self._link = link
        self._index = index
        self._before = index - 1 if index > 0 else None
        self._after = index + 1 if index + 1 < stages else None
        self._checkpoint = checkpoint
        self._due = (0, 0)  # a neighbour, and how many messages it still sends
        self._passed: dict[int, Value] = {}  # outputs that wait for their gradients, by micro-batch

    def forward(self, values: Sequence[Value], *, backward: bool) -> list[Value]:
        """Runs the forward pass.

        Args:
            values: micro-batches, on the first rank; others receive them.
            backward: gradients will come; the same on all ranks.

        Raises:
            RankMismatchError: the rank before says otherwise about ``backward``.
            RankLostError: a neighbour failed.
        """
        outputs: list[Value] = []
        count = len(values)
        self._passed.clear()
        with self._telling([self._before, self._after]):
            while not outputs or len(outputs) < count:
                i = len(outputs)
                if self._before is None:
                    value = values[i]
                else:
                    value, count = self._take(i, backward)
                if i == 0:
                    expect_micro_batches(self._layers, count)
                stop = checkpointed_cells(self._checkpoint, count) if backward else 0
                value, _ = run_cell(
                    self._layers, value, {}, f"chunk{i}-part{self._index}", checkpoint=i < stop
                )
                outputs.append(value)
                if self._after is not None:
                    facts = {"micro-batch": i, "of": count, "backward": backward}
                    facts["single"] = not isinstance(value, tuple)
                    self._link.send(self._after, facts, in_tuple(value))
            if not backward:  # else not yet: from a rank that fails instead of receiving, backward hears it
                self._link.flush()
        if backward and self._after is not None:
            self._passed = dict(enumerate(outputs))
        return outputs

    def _take(self, i: int, backward: bool) -> tuple[Value, int]:
        """Takes micro-batch i from the rank before, and how many there are; its gradients will be sent back."""
        facts, tensors = self._link.receive(self._index - 1)
        self._due = (self._index - 1, facts["of"] - i - 1)
        if facts["backward"] != backward:
            raise RankMismatchError(
                f"stages {self._index - 1} and {self._index} of a pipeline disagree whether backward follows "
                f"({facts['backward']} and {backward}): call train() or eval() on all ranks, and forward with or "
                "without grad mode on all"
            )
        leaves = [
            t.requires_grad_() for t in tensors if backward and (t.is_floating_point() or t.is_complex())
        ]
        if leaves:
            self._send_gradients_of(i, leaves)
        return (tensors[0] if facts["single"] else tuple(tensors)), facts["of"]

    def _send_gradients_of(self, i: int, leaves: list[torch.Tensor]) -> None:
        """Sends the gradients of all these inputs of micro-batch i to the rank before, once backward has them."""
        sent = False

        def send(gradients: Sequence[torch.Tensor | None]) -> None:
            nonlocal sent
            if sent:
                raise LifecycleError(
                    "backward through a pipeline over ranks runs once for each forward: the other stages have let go "
                    "of their activations; run forward again"
                )
            sent = True
            whole = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]
            self._link.send(self._index - 1, {"micro-batch": i}, whole)
            self._link.flush()

        torch.autograd.graph.register_multi_grad_hook(leaves, send)

    def backward(self) -> None:
        """The backward pass, on all ranks but the last: gradients from the rank after go through this rank's layers.

        Raises:
            RankLostError: a neighbour failed.
        """
        after = self._index + 1
        with self._telling([self._before]):
            for left in reversed(range(len(self._passed))):
                facts, gradients = self._link.receive(after)
                self._due = (after, left)
                value = self._passed.pop(facts["micro-batch"])
                outputs = [t for t in in_tuple(value) if t.is_floating_point() or t.is_complex()]
                pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            self._link.flush()

    @contextlib.contextmanager
    def _telling(self, neighbours: Sequence[int | None]) -> Iterator[None]:
        """Turns an error on this rank into one on these neighbours, which wait for it."""
        self._due = (0, 0)
        try:
            yield
        except Exception as error:
            facts: StateDict = {"error": str(error)[:600]}
            if not isinstance(error, RankLostError):
                told = f"stage {self._index} of the pipeline failed: {type(error).__name__}: {error}"
                facts = {"error": told[:600]}
            with contextlib.suppress(RuntimeError):  # the error at hand is what matters
                self._link.drop()
                src, left = self._due
                for _ in range(left if src not in self._link.failed else 0):
                    # and drop what a neighbour still sends, which would wait for that
                    self._link.receive(src)
                for neighbour in neighbours:
                    if neighbour is not None and neighbour not in self._link.failed:
                        self._link.send(neighbour, facts)
                self._link.flush(_PATIENCE_SECONDS)
            raise


def in_tuple(value: Value) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
