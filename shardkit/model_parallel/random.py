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

from ..backend import Backend, backend_for_device
from ..errors import BackendError, ConfigurationError, LifecycleError
from ..torch_seams.compiling import not_compiled
from ..types import AnyCallable, Context, Tree
from ..wrapping.activations import Surroundings, no_autocast_cache
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
    """The state of the device's generator after it was seeded."""
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
        """Name -> state; a dict of its own."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.ByteTensor]) -> None:
        """Takes what :meth:`get_states` has returned."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A new stream; the generator's own goes on as if nothing had been.

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
        """Within this block random numbers come from the stream of that name, and go on there the next time.

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

    @contextlib.contextmanager
    def again(self, states: dict[str, torch.ByteTensor]) -> Iterator[None]:
        """Within this block the streams are where they were when :meth:`get_states` returned this."""
        now = self.get_states()
        self.set_states(dict(states))
        try:
            yield
        finally:
            self.set_states(now)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker that layers share."""
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


class _OfCheckpoint(Context):
    run_function: AnyCallable
    args: list[object]
    places: list[tuple[int, bool]]  # of tensors among the arguments, and whether they want a gradient
    surroundings: Surroundings
    streams: dict[str, torch.ByteTensor]


class CheckpointFunction(torch.autograd.Function):
    """``apply(run_function, *args)``: runs a function without a graph, and again, with one, in backward."""

    @staticmethod
    def forward(ctx: _OfCheckpoint, run_function: AnyCallable, *args: object) -> Tree:  # type: ignore[override]
        ctx.run_function = run_function
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        ctx.args = [None if isinstance(a, torch.Tensor) else a for a in args]
        ctx.places = [(i, a.requires_grad) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        ctx.surroundings = Surroundings([*tensors, torch.empty(0, device=device_backend().device())])
        ctx.streams = _tracker.get_states()
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with torch.no_grad(), no_autocast_cache():
            return run_function(*args)

    @staticmethod
    def backward(ctx: _OfCheckpoint, *args: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():
            raise LifecycleError(
                "a checkpoint computes its gradients within backward(); torch.autograd.grad() and backward(inputs=...) "
                "can't reach through it. Call backward(), or run the function without checkpoint()"
            )
        inputs = list(ctx.args)
        for (place, requires_grad), tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = tensor.detach().requires_grad_(requires_grad)
        with ctx.surroundings.again(), _tracker.again(ctx.streams), torch.enable_grad():
            outputs = ctx.run_function(*inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = zip(outputs, args, strict=True)
        wanted = [
            (o, g) for o, g in pairs if g is not None and isinstance(o, torch.Tensor) and o.requires_grad
        ]
        if wanted:
            torch.autograd.backward([o for o, _ in wanted], [g for _, g in wanted])
        return (None, *(x.grad if isinstance(x, torch.Tensor) else None for x in inputs))


@not_compiled
def checkpoint(function: AnyCallable, *args: object) -> Tree:
    """Runs ``function(*args)``, keeps its arguments only, and computes its activations again in backward.

    Random numbers, also those of the tracker's streams, are the same both times.

    Args:
        function: returns a tensor or a tuple of tensors.
        *args: tensors, or anything without a gradient.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    # The last argument requires a gradient, so that backward comes also where only parameters do.
    anchor = torch.empty(0, requires_grad=True)
    return CheckpointFunction.apply(lambda *all_: function(*all_[:-1]), *args, anchor)
