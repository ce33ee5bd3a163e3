"""An optimizer's state dict over shards, as torch.distributed.checkpoint meets it.

``optimizer.state_dict()`` has the state of this rank's shards, under the same keys on all ranks. For a file of each
rank's own that is right. torch.distributed.checkpoint takes plain tensors for the same on all ranks, and would keep one
rank's. So in a state dict these have a class of their own, which refuses that and is a plain tensor in all other
respects; what is pickled is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ..errors import ShardkitError
from ..shards import shard_behind

_plain = torch._C.DisableTorchFunctionSubclass


class StateOfShard(torch.Tensor):
    """A state with one element for each of a shard, in a state dict. Copies of it are such, too."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with _plain():
            result = func(*args, **(kwargs or {}))
            own = args[0] if args and isinstance(args[0], cls) else None
            if own is not None and type(result) is torch.Tensor and result.shape == own.shape:
                result.__class__ = cls
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = self.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _plain():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def _refuse(self, *_: Any) -> NoReturn:
        # no ConfigurationError: for a ValueError torch would put a message of its own
        raise ShardkitError(
            "this optimizer state is of FSDP's shards, another part on each rank, and torch.distributed.checkpoint "
            "would keep one rank's for all. Save what FSDP.gather_full_optim_state_dict(optimizer) returns (on rank 0; "
            "load it by get_shard_from_optim_state_dict), or optimizer.state_dict() with torch.save for each rank"
        )

    # What torch.distributed.checkpoint asks of a tensor that knows how it is spread.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


def mark_state_dicts(optimizer: Optimizer) -> None:
    """From now on the optimizer's state dicts tell whose state they hold; it still loads them."""
    optimizer.register_state_dict_post_hook(_marked)
    optimizer.register_load_state_dict_pre_hook(_unmarked)


def _marked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    state = dict(state_dict["state"])
    for index, values in state.items():
        param = params[index] if isinstance(index, int) else None
        flat = None if param is None else shard_behind(param)
        if flat is not None and flat.group.world_size > 1:
            state[index] = {
                k: v.as_subclass(StateOfShard) if _is_spread(v, param) else v for k, v in values.items()
            }
    return {**state_dict, "state": state}


def _is_spread(value: Any, param: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _unmarked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        index: {
            k: v.as_subclass(torch.Tensor) if isinstance(v, StateOfShard) else v for k, v in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
