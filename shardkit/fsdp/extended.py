"""Parameters whose class says what is gathered of them, and what is made of that: torch's extensions of the all-gather.

[Note: extensions] A class of tensors with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (float8 that is cast
before it travels, quantized weights) is cut by its own operations, as FSDP2 cuts it: what modules list is a DTensor
over this rank's part, of that class, and there is no shard in memory. Before each gather the part says what travels,
tensors of any dtypes. What arrived makes the parameter that modules compute with, of another class maybe: it is there
from the first gather on. Later ones write to the memory of the same tensors, for autograd may have views of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from ..backend import DONE, Group
from ..checks import check_same_everywhere
from ..torch_seams.tensors import contiguous_strides, parts_with_memory
from ..types import Tree
from .originals import (
    GatheredParameter,
    OriginalParameter,
    Place,
    ReleasedParameter,
    note_originals,
    without_values,
    written_original,
)
from .store import GATHERING, RELEASED, SUMMONED, Store

if TYPE_CHECKING:
    from .flat_param import FlatParam

_keeping_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


@final
class Extended(Store):
    """Original parameters are made by their own classes; see [Note: extensions]."""

    def __init__(self, flat: FlatParam) -> None:
        super().__init__(flat)
        self._extended: list[ExtendedParameter] = [
            o for o in flat.originals if isinstance(o, ExtendedParameter)
        ]
        for original in self._extended:
            original.memory = []
        self._outputs: list[torch.Tensor] = []  # for each input, [W * n]
        self._places: list[torch.Tensor] = []  # the same, [W, bytes]

    serves_on = True  # what was made lies in this memory

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data

    def attach(self) -> None:
        self._give_back()

    def show(self, values: torch.Tensor) -> None:
        """Does nothing: they have memory of their own."""

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERING
        if self._flat.host is not None:
            self._from_host(torch.empty_like(self._flat.host, device=self._device))
            return
        with torch.no_grad():
            inputs = [t for original in self._extended for t in original.inputs()]
        if not self._outputs:
            self._make_room(inputs)
        sent = torch.cat([t.to(self._device).contiguous().view(-1).view(torch.uint8) for t in inputs])
        if self._group.world_size == 1:
            self.in_flight = DONE, sent
            return
        full = sent.new_empty(self._group.world_size * sent.numel())
        self.in_flight = self._gather(full, sent, async_op=True, label=self._flat.label), full

    def _make_room(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes memory before the first gather (collective): inputs differ where a class does not pad its last rows.

        Raises:
            RankMismatchError: on all ranks.
        """
        facts = [(f"input {k}", (t.dtype, tuple(t.shape))) for k, t in enumerate(inputs)]
        check_same_everywhere(self._group, facts, f"fsdp_pre_all_gather ({', '.join(self._flat.names)})")
        world_size = self._group.world_size
        self._outputs = [t.new_empty(world_size * t.numel(), device=self._device) for t in inputs]
        self._places = [output.view(torch.uint8).view(world_size, -1) for output in self._outputs]

    @torch.no_grad()
    def _show_gathered(self, values: torch.Tensor) -> None:
        if self._flat.keeps_on_host:
            self._to_host(values)
        for original in self._extended:
            for tensor in original.memory:
                self._backend.take_storage(tensor)
        outputs = iter(self._outputs)
        with _keeping_versions(tuple(self._outputs)):
            sizes = [place.shape[1] for place in self._places]
            torch.split_with_sizes_copy(values.view(len(self._places[0]), -1), sizes, dim=1, out=self._places)
            for original in self._extended:
                original.make(outputs, self._dtype)
        note_originals(self._flat)
        self._reveal()

    def _give_back(self, until_backward: bool = False) -> None:
        self._conceal()
        for original in self._extended:
            for tensor in original.memory:
                self._backend.release_storage(tensor)
        self.state = RELEASED

    def summon(self) -> torch.Tensor:
        """Shows them as they are computed with."""
        self.start()
        self.finish()
        self.state = SUMMONED
        return self.gathered

    def keep(self, values: torch.Tensor) -> None:
        flat = self._flat
        flat.written = [
            k
            for k, (o, v) in enumerate(zip(self._extended, self._versions, strict=True))
            if o.param._version != v + 1
        ]
        if flat.written:
            self._versions = []
            self.attach()
            raise written_original(flat)


class ExtendedParameter(OriginalParameter):
    """See [Note: extensions].

    Attributes:
        part: this rank's rows; all of them until they are cut.
        memory: of what was made of them, and is given back.
    """

    beside = "has a class with fsdp_pre_all_gather"
    store = Extended
    is_apart = True

    def __init__(self, param: nn.Parameter, place: Place, home: int = 0) -> None:
        super().__init__(param, place, home)
        self.part: Tree = param.detach()
        self.memory: list[torch.Tensor] = []

    @property
    def values(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.param.dtype)

    def assign(self, values: torch.Tensor) -> None:
        """Does nothing: it has memory of its own."""

    def replace(self, empty: torch.Tensor) -> None:
        """Gives it a shape until the next gather."""
        self.kind, self.released = GatheredParameter, ReleasedParameter
        self.param = nn.Parameter(
            empty.new_empty(()).expand(self.shape), requires_grad=self.param.requires_grad
        )

    @torch.no_grad()
    def cut(self, group: Group, senders: Sequence[Group], device: torch.device, *asked: object) -> None:
        """Keeps this rank's rows, after the values of the first rank of each of the senders have replaced its own.

        Args:
            asked: what ``fsdp_pre_all_gather`` is told: the mesh, and the dtypes in torch's words.
        """
        self._asked, whole = asked, self.part if self.part.is_meta else self.part.to(device)
        for tensor in [] if whole.is_meta else list(parts_with_memory(whole)):
            for sender in senders:
                sender.channel("buffers").broadcast(tensor, 0, label="parameters of rank 0")
        chunks = torch.chunk(whole, group.world_size)
        rows = chunks[group.rank].size(0) if group.rank < len(chunks) else 0
        self.part = whole.new_zeros(chunks[0].size()).narrow(0, 0, rows)
        if rows:
            self.part.copy_(chunks[group.rank])
        self.replace(torch.empty(0, dtype=whole.dtype, device=whole.device))

    def inputs(self) -> Sequence[torch.Tensor]:
        """Returns the tensors of this rank's part that travel."""
        before = self.part.fsdp_pre_all_gather
        mesh, policy = self._asked
        if len(inspect.signature(before).parameters) == 1:  # torch's first form
            sent, self._metadata = before(mesh)
        else:
            module = self.places[0].module
            sent, self._metadata = before(mesh, self.shape, contiguous_strides(self.shape), module, policy)
        self._shapes = [t.shape for t in sent]
        return tuple(sent)

    def make(self, arrived: Iterator[torch.Tensor], dtype: torch.dtype) -> None:
        """Makes the parameter of what has arrived; the first time it becomes another object."""
        flat = [next(arrived) for _ in self._shapes]
        outputs = tuple(t.view(-1, *shape[1:]) for t, shape in zip(flat, self._shapes, strict=True))
        after = self.part.fsdp_post_all_gather
        if self.memory:
            self.param.__class__ = self.kind
            with _keeping_versions(self.param):
                after(outputs, self._metadata, dtype, out=self.param)
            return
        made, inner = after(outputs, self._metadata, dtype)
        made = torch.as_strided(made, self.shape, contiguous_strides(self.shape), 0)
        before, self.param = self.param, nn.Parameter(made, requires_grad=self.param.requires_grad)
        self.param._post_accumulate_grad_hooks = before._post_accumulate_grad_hooks
        self.kind = GatheredParameter if type(self.param) is nn.Parameter else type(self.param)
        self.released = without_values(ReleasedParameter, self.param)
        for module, name in self.places:
            module.__dict__[name] = self.param
        self.memory = [*{t.untyped_storage()._cdata: t for t in (*flat, *inner)}.values()]


def no_values(numel: int, like: torch.Tensor) -> torch.Tensor:
    """Stands for a shard [S] that is not in memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(numel)


def is_extended(param: nn.Parameter) -> bool:
    """Whether its class says what is gathered of it."""
    return hasattr(param, "fsdp_pre_all_gather") and hasattr(param, "fsdp_post_all_gather")
