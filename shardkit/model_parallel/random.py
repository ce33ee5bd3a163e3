"""Random numbers within model-parallel regions, and activation checkpoints that draw the same ones again.

Outside of such regions all ranks of a model draw alike; inside, where each rank has its own part of an activation,
each has a stream of its own. fairscale tracks the generator of the CUDA device; here it is that of the accelerator,
and of the CPU where there is none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ..backend import Backend, backend_for_device
from ..errors import BackendError, ConfigurationError
from ..torch_seams.compiling import not_compiled
from ..types import AnyCallable, Tree
from ..wrapping.activations import call_checkpointed
from .groups import get_data_parallel_rank, get_model_parallel_rank

_log = logging.getLogger("shardkit.model_parallel")
_TRACKER_NAME = "model-parallel-rng"
# How far the seeds within regions are from those outside: fairscale's number, so that the same values are drawn.
_OFFSET = 2718


def device_backend() -> Backend:
    """Returns the accelerator's, where there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        with contextlib.suppress(BackendError):
            return backend_for_device(accelerator.type)
    return backend_for_device("cpu")


def seeded_state(seed: int) -> Tree:
    """Returns the state of the device's generator after it was seeded."""
    return torch.Generator(device=device_backend().device()).manual_seed(seed).get_state()


class CudaRNGStatesTracker:
    """Streams of random numbers by name, beside the generator's own.

    Attributes:
        states_: name -> state of the generator.
        seeds_: those that are taken.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all streams."""
        self.states_: dict[str, torch.ByteTensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.ByteTensor]:
        """Returns the name -> state; a dict of its own."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.ByteTensor]) -> None:
        """Takes what :meth:`get_states` has returned."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds a stream; the generator's own goes on as if nothing had been.

        Raises:
            ConfigurationError: the name or the seed is taken.
        """
        if seed in self.seeds_:
            raise ConfigurationError(
                f"seed {seed} already exists; streams with the same seed would draw the same numbers"
            )
        if name in self.states_:
            raise ConfigurationError(
                f"a random state named {name!r} already exists; choose another name or reset()"
            )
        self.seeds_.add(seed)
        self.states_[name] = seeded_state(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _TRACKER_NAME) -> Iterator[None]:
        """Draws random numbers, within this block, from the stream of that name, and goes on there the next time.

        Raises:
            ConfigurationError: there is none.
        """
        if name not in self.states_:
            raise ConfigurationError(
                f"no random state named {name!r}; call model_parallel_cuda_manual_seed(seed), or add(name, seed) first"
            )
        backend = device_backend()
        outside = backend.rng_state()
        backend.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = backend.rng_state()  # type: ignore[assignment]
            backend.set_rng_state(outside)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker that layers share."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the accelerator's generator alike on all ranks, and a stream for model-parallel regions, one for each rank
    of a model.

    Without an accelerator the CPU's generator is left as it is, as by fairscale; it gets the stream all the same.

    Args:
        seed: the same on all ranks.

    Raises:
        GroupsError: model parallelism is not initialized.
    """
    own = seed + _OFFSET + get_model_parallel_rank()
    if dist.get_rank() == 0:
        _log.info(
            "seeds on rank 0 (data parallel rank %d): %d within model-parallel regions, %d outside",
            get_data_parallel_rank(),
            own,
            seed,
        )
    backend = device_backend()
    if backend.device_type != "cpu":
        backend.set_rng_state(seeded_state(seed))
    _tracker.reset()
    _tracker.add(_TRACKER_NAME, own)


@not_compiled
def checkpoint(function: AnyCallable, *args: object) -> Tree:
    """Runs ``function(*args)``, keeps its arguments only, and computes its activations again in backward.

    Random numbers, also those of the tracker's streams, are the same both times.

    Args:
        function: returns a tensor or a tuple of tensors.
        *args: tensors, or anything without a gradient.
    """
    before: dict[str, torch.ByteTensor] | None = None  # the streams, before the first run

    def run(*args: object) -> Tree:
        nonlocal before
        if before is None:
            before = _tracker.get_states()
            return function(*args)
        now = _tracker.get_states()
        _tracker.set_states(dict(before))
        try:
            return function(*args)
        finally:
            _tracker.set_states(now)

    # A parameter beside the arguments: backward comes also where only the function's own parameters want a gradient,
    # and the generator of its device, from which the streams draw, is put back.
    device = nn.ParameterList([torch.empty(0, device=device_backend().device())])
    return call_checkpointed(run, args, {}, near=device)
