"""Arguments of torch's ``fully_shard`` (FSDP2), as options of this one's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import nn

from ..errors import ConfigurationError
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..types import Tree
from .calls import cast_inputs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as TorchsOffloadPolicy


class TorchsArguments(TypedDict, total=False):
    """What may be passed; see :class:`TorchsWords`."""

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: TorchsOffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    shard_placement_fn: object


class TorchsWords(NamedTuple):
    """What was said in torch's words; None where nothing was."""

    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: TorchsOffloadPolicy | None = None
    ignored_params: set[nn.Parameter] | None = None
    shard_placement_fn: object = None

    def check(self) -> None:
        """Raises ConfigurationError for what has no counterpart."""
        if self.ignored_params:
            raise ConfigurationError(
                f"ignored_params ({len(self.ignored_params)} parameters): fully_shard takes all those of a module. "
                "Leave the modules that hold them out: call fully_shard on the others, one by one"
            )
        if self.shard_placement_fn is not None:
            raise ConfigurationError(
                "shard_placement_fn: shards are even parts of flat parameters here, not rows of a dimension; leave it "
                "out. Values are the same"
            )
        mp = self.mp_policy
        if mp is not None and mp.param_dtype is not None and not mp.cast_forward_inputs:
            raise ConfigurationError(
                f"cast_forward_inputs=False with param_dtype={mp.param_dtype}: inputs are cast to the dtype of compute "
                "here. Leave cast_forward_inputs out, and cast inside of the module what has to stay as it is"
            )

    def precision(self, given: PrecisionPolicy | None) -> PrecisionPolicy | None:
        """Dtypes of compute."""
        if self.mp_policy is None:
            return given
        _refuse_both("mp_policy", "precision", given)
        return PrecisionPolicy(compute=self.mp_policy.param_dtype)

    def reduce(self, given: ReducePolicy | None) -> ReducePolicy | None:
        """The dtype on the wire."""
        if self.mp_policy is None or self.mp_policy.reduce_dtype is None:
            return given
        _refuse_both("mp_policy.reduce_dtype", "reduce", given)
        return ReducePolicy(dtype=self.mp_policy.reduce_dtype)

    def reshard(self, given: ReshardPolicy | None) -> ReshardPolicy | None:
        """When parameters are given back; True and numbers are for a root too, as in torch."""
        if self.reshard_after_forward is None:
            return given
        _refuse_both("reshard_after_forward", "reshard", given)
        return ReshardPolicy(after_forward=self.reshard_after_forward, root=True)

    def offload(self, given: OffloadPolicy | None) -> OffloadPolicy | None:
        """What is on the host."""
        if self.offload_policy is None:
            return given
        from torch.distributed.fsdp import CPUOffloadPolicy

        _refuse_both("offload_policy", "offload", given)
        return OffloadPolicy(parameters=isinstance(self.offload_policy, CPUOffloadPolicy))

    def cast_outputs_of(self, module: nn.Module) -> None:
        """Outputs of its forward have ``output_dtype`` from now on."""
        if self.mp_policy is not None and self.mp_policy.output_dtype is not None:
            module.register_forward_hook(partial(_cast_outputs, self.mp_policy.output_dtype))


def in_torchs_words(given: TorchsArguments) -> TorchsWords:
    """What was said, checked.

    Raises:
        TypeError: a word of nobody's.
        ConfigurationError: it has no counterpart.
    """
    unknown = [name for name in given if name not in TorchsWords._fields]
    if unknown:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    words = TorchsWords(**given)
    words.check()
    return words


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: object, outputs: Tree) -> Tree:
    return cast_inputs(outputs, dtype)


def _refuse_both(torchs: str, ours: str, given: object) -> None:
    if given is not None:
        raise ConfigurationError(
            f"both {torchs} and {ours} were passed, which say the same thing; leave one out"
        )


def modules_of(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One module, or several: torch's function takes a list too."""
    return [module] if isinstance(module, nn.Module) else list(module)
