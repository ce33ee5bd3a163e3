"""Answers to torch.distributed.checkpoint: tensors that are one rank's alone, and who is asking for a state dict.

It takes plain tensors for the same on all ranks, and would keep one rank's. So what is a rank's own has a class of its
own in state dicts, which refuses that and is a plain tensor in all other respects; what is pickled is one.

[Note: requests] ``torch.distributed.checkpoint.state_dict`` (``get_model_state_dict`` and its kin) walks over the
modules of a model and asks each for ``_fqn_modifiers()``, names that are no part of a parameter's. It does so first,
and nobody else does. There a wrapper can see what is wanted, from the arguments of the function that was called, and
refuse what would be wrong, before anything is sent or changed. Nothing else tells it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar, NoReturn

import torch
from torch.optim import Optimizer

from ..errors import ShardkitError
from ..types import AnyCallable, Args, Kwargs, Memo, Tree
from .hooks import callers
from .tensor_facts import MarkedTensor, as_plain, stays_marked

_TORCHS = "torch.distributed.checkpoint.state_dict"
_OF_MODELS = ("get_model_state_dict", "set_model_state_dict")
_OF_OPTIMIZERS = ("get_optimizer_state_dict", "set_optimizer_state_dict", "get_state_dict", "set_state_dict")


class OwnOfRank(MarkedTensor):
    """A tensor in a state dict that is another one on each rank. Copies of it are such, too."""

    remedy: ClassVar[str] = ""

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_plain():
            result = func(*args, **(kwargs or {}))
            if stays_marked(result, args, cls):
                result.__class__ = cls
        return result

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        copied: torch.Tensor = self.clone()
        memo[id(self)] = copied
        return copied

    def _refuse(self, *_: object) -> NoReturn:
        # no ConfigurationError: for a ValueError torch would put a message of its own
        raise ShardkitError(self.remedy)

    # What torch.distributed.checkpoint asks of a tensor that knows how it is spread.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of one of torch's functions that get or set the state dicts of a model and its optimizers.

    Attributes:
        optimizers: what was passed; empty for functions of models alone.
        options: its StateDictOptions, None for the default.
        submodules: what was passed, of which alone a state dict is wanted.
    """

    function: str
    optimizers: tuple[Optimizer, ...]
    options: object
    submodules: object

    def wants(self, option: str) -> bool:
        """Says whether a flag of the options is set."""
        return bool(getattr(self.options, option, False))


def current_request() -> Request | None:
    """Tells what torch is being asked for at this moment; see [Note: requests]."""
    for frame in callers():
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == _TORCHS and name in _OF_MODELS + _OF_OPTIMIZERS:
            given = frame.f_locals
            optimizers = given.get("optimizers", ()) if name in _OF_OPTIMIZERS else ()
            optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
            return Request(name, optimizers, given.get("options"), given.get("submodules"))
    return None


def is_called_by(function: str) -> bool:
    """Says whether that function of torch's called the method that asks, through what torch puts around methods."""
    for frame in islice(callers(), 1, 5):
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == _TORCHS:
            return True
    return False
