"""Messages between neighbouring ranks of a pipeline: a short text that says what comes, then tensors.

Tensors travel as bytes, so that every dtype does. What can't be sent from its device (gloo and CUDA) goes through host
memory.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import ConfigurationError, RankLostError
from ..types import StateDict

_HEADER_BYTES = 1024


class Link:
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
        """What a rank of the group sent: facts and tensors.

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
