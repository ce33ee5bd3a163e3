"""Registered parameters: this rank's shards, as optimizers and users see them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..errors import LifecycleError
from ..flattening.flat_parameter import FlatParameter
from ..optimizers.shards import note_shard, shard_behind
from ..torch_seams.hooks import check_asked_gradients
from .originals import FlatParamLike


def flat_of_registered(param: nn.Parameter) -> FlatParamLike | None:
    """The flat parameter whose shard a registered parameter is, None for other parameters."""
    flat: FlatParamLike | None = shard_behind(param)
    return flat


def note_registered(param: nn.Parameter, flat: FlatParamLike) -> None:
    """From now on this parameter is known to be the shard of that flat parameter."""
    if type(param) is FlatParameter:
        param.__class__ = ShardedFlatParameter
    note_shard(param, flat)
    check_asked_gradients(_refuse_shards)


@contextlib.contextmanager
def _refuse_shards(inputs: Sequence[torch.Tensor], accumulate: bool) -> Iterator[None]:
    """Raises LifecycleError where a backward is asked for gradients of shards."""
    for asked in inputs:
        flat = flat_of_registered(asked) if isinstance(asked, nn.Parameter) else None
        if flat is not None:
            raise LifecycleError(
                f"rank {flat.group.ranks[flat.group.rank]}: torch.autograd.grad and backward(inputs=...) can't give "
                f"gradients of an FSDP module's parameters() (here of {flat.label or 'a unit'}): these are shards, "
                "which autograd never sees. Call loss.backward() without inputs= and read their .grad"
            )
    yield


class ShardedFlatParameter(FlatParameter):
    """A flat parameter's shard. The attributes are those that existing code reads from fairscale's parameters."""

    @property
    def _flat(self) -> FlatParamLike:
        flat = flat_of_registered(self)
        if flat is None:
            raise AttributeError("this parameter was part of an FSDP module that is gone")
        return flat

    @property
    def _is_sharded(self) -> bool:
        return self._flat.group.world_size > 1

    @property
    def _is_shared(self) -> bool:
        return False

    @property
    def _orig_size(self) -> torch.Size:
        return torch.Size([self._flat.layout.numel])

    @property
    def _fp32_shard(self) -> torch.Tensor:
        return self.data

    @property
    def _fp16_shard(self) -> torch.Tensor | None:
        """None: shards are cast on their way into the gathered flat parameter."""
        return None

    @property
    def _full_param_padded(self) -> torch.Tensor:
        """The gathered flat parameter [W * S]; without memory while the unit is not gathered."""
        return self._flat.gathered

    @property
    def _saved_grad_shard(self) -> torch.Tensor | None:
        return self.grad

    @property
    def _cpu_grad(self) -> torch.Tensor | None:
        return self.grad if self.device.type == "cpu" else None
