"""State that each rank has of its own: generators of random numbers, and its place in the data.

[Note: another world size] Where a checkpoint is restored by another number of ranks than wrote it (W), rank r takes
the random states of rank r % W: the first W ranks go on as they were, and further ones begin where others do, so that
no state is made up. A loader's states go to all ranks where they are equal on all; else only the loader itself knows
how to divide what is left, by :meth:`TakesRankStates.load_rank_states`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ..backend import Backend
from ..errors import ConfigurationError
from ..optimizer_state.kinds import to_cpu
from ..types import StateDict, Tree


class Stateful(Protocol):
    """The methods that schedulers, scalers and loaders have."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


@runtime_checkable
class TakesRankStates(Protocol):
    """A loader or sampler that goes on from the states of another number of ranks."""

    def load_rank_states(self, states: Sequence[StateDict], /) -> object:
        """Takes the states of all ranks that wrote a checkpoint, in the order of ranks; all ranks call it alike."""
        ...


def random_states(backend: Backend) -> StateDict:
    """Returns the states of Python, numpy if it was imported, torch on the host, and the device; as data."""
    found: StateDict = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(gauss))
    if backend.device_type != "cpu":
        found[backend.device_type] = to_cpu(backend.rng_state())
    return found


def set_random_states(backend: Backend, states: StateDict) -> None:
    """Does the reverse; generators of which nothing was saved stay as they are."""
    if "python" in states:
        version, inner, gauss = states["python"]
        random.setstate((version, tuple(inner), gauss))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), position, has_gauss, gauss))
    if backend.device_type != "cpu" and backend.device_type in states:
        backend.set_rng_state(states[backend.device_type])


def load_loader(loader: Stateful, states: Sequence[StateDict | None], world_size: int | None) -> None:
    """Gives a loader its rank's state, or what it can make of others'.

    Args:
        states: of all ranks that wrote the checkpoint; or its own alone.
        world_size: of those that restore; None: its own state is given.
    """
    there = [state for state in states if state is not None]
    if len(there) != len(states):
        raise ConfigurationError(
            "the checkpoint has no state of a loader: it was saved without loader=. Restore without it"
        )
    if world_size is None:
        loader.load_state_dict(there[0])
        return
    places = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    takes = next((place for place in places if isinstance(place, TakesRankStates)), None)
    if takes is not None:
        takes.load_rank_states(there)
    elif all(equal(state, there[0]) for state in there):
        loader.load_state_dict(there[0])
    else:
        raise ConfigurationError(
            f"the checkpoint has the places in the data of {len(there)} ranks, each its own, and {world_size} ranks "
            f"restore it: {type(loader).__name__} has no load_rank_states(states) that says how they go on. Restore "
            "with as many ranks, use a sampler that counts samples over all ranks, or restore without loader= (the "
            "epoch begins anew)"
        )


def equal(a: Tree, b: Tree) -> bool:
    """Says whether two values are the same, tensors and arrays in containers of theirs too; NaN is the same as NaN."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__module__ == "numpy" and hasattr(a, "tobytes"):
        kinds = (getattr(a, "dtype", None), getattr(a, "shape", None))
        return kinds == (getattr(b, "dtype", None), getattr(b, "shape", None)) and a.tobytes() == b.tobytes()
    try:
        return type(a) is type(b) and (bool(a == b) or (isinstance(a, float) and repr(a) == repr(b)))
    except (TypeError, ValueError, RuntimeError):
        return False
