"""A sequential model whose parameters are on the device slice by slice.

FSDP with offloading (``shardkit.OffloadPolicy``) serves any model and any number of ranks; this class needs one rank
and an ``nn.Sequential``.

[Note: what backward needs] Autograd saves views of weights, which would keep a slice's memory on the device between
its forward and its backward. What is saved of a parameter here is which one and which view; backward takes that from
the slice, which is on the device again by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.torch_seams.tensors import move_buffers
from shardkit.types import Args, Context, Tree
from shardkit.wrapping.activations import checkpoint_wrapper


class ModelShard(nn.Module):
    """A slice of the model; its parameters and buffers rest on one device and compute on another.

    Parameters are not copied back: forward and backward don't change them. Gradients and buffers are.

    Args:
        device: where it computes.
        offload_device: where it rests.
        index: its place in the model.
    """

    def __init__(
        self, cpu_model_shard: nn.Module, device: torch.device, offload_device: torch.device, index: int
    ) -> None:
        super().__init__()
        self.model_shard = cpu_model_shard.to(offload_device)
        self.index = index
        self.device = device
        self.offload_device = offload_device
        self._resting: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]] | None = None

    def forward(self, *inputs: Tree) -> Tree:
        if not torch.is_grad_enabled():
            return self.model_shard(*inputs)
        params = {p.untyped_storage().data_ptr(): p for p in self.model_shard.parameters() if p.numel()}
        with torch.autograd.graph.saved_tensors_hooks(partial(_pack, params), _unpack):
            return self.model_shard(*inputs)

    def to(self, device: torch.device) -> ModelShard:  # type: ignore[override]
        self.model_shard.to(device)
        return self

    def to_device(self) -> None:
        """Moves the slice to where it computes, for good."""
        self.model_shard.to(self.device)

    @torch.no_grad()
    def forward_load(self, non_blocking: bool = True) -> None:
        """Moves parameters and buffers to where they compute; nothing if they are there."""
        if self._resting is not None:
            return
        self._resting = []
        for p in self.model_shard.parameters():
            gradient, p.grad = p.grad, None
            self._resting.append((p, p.data, gradient))
            p.data = p.data.to(self.device, non_blocking=non_blocking)
        for m in self.model_shard.modules():
            move_buffers(m, self.device, non_blocking=non_blocking)

    backward_load = forward_load

    @torch.no_grad()
    def forward_drop(self, non_blocking: bool = True) -> None:
        """Moves parameters and buffers to where they rest, which is waited for.

        Gradients, which there are after backward, are added to those that rest there.
        """
        resting, self._resting = self._resting, None
        for p, data, gradient in resting or ():
            new, p.grad = p.grad, None
            p.data = data
            if new is not None:
                moved = new.to(data.device)  # waited for: the optimizer reads it on the host
                gradient = moved if gradient is None else gradient.add_(moved)
            p.grad = gradient
        for m in self.model_shard.modules():
            move_buffers(m, self.offload_device)

    backward_drop = forward_drop


def _pack(
    params: Mapping[int, torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor | Callable[[], torch.Tensor]:
    param = params.get(tensor.untyped_storage().data_ptr())
    if param is None or tensor.dtype != param.dtype:
        return tensor
    version, view = param._version, (tensor.size(), tensor.stride(), tensor.storage_offset())

    def again() -> torch.Tensor:
        if param._version != version:
            raise LifecycleError(
                "a parameter was changed in place between forward and backward of an OffloadModel; step the optimizer "
                "after backward"
            )
        return param.detach().as_strided(*view)

    return again


def _unpack(saved: torch.Tensor | Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved()


class _Border(Context):
    model: OffloadModel
    index: int


class ShardSyncLayer(torch.autograd.Function):
    """The border behind slice ``index`` (-1: in front of the model): hands its tensors on and moves slices.

    ``apply(model, index, anchor, *tensors)``. Forward drops what has run and loads what comes next; backward does the
    reverse. The anchor requires a gradient, so that backward comes also where no tensor does.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Border, model: OffloadModel, index: int, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.model, ctx.index = model, index
        ctx.set_materialize_grads(False)
        shards = model.model_slices
        if index >= 0:
            shards[index].forward_drop()
        if index + 1 < len(shards):
            shards[index + 1].forward_load()
        return tuple(t.detach() for t in tensors)  # no views: layers may work on them in place

    @staticmethod
    def backward(ctx: _Border, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        shards, index = ctx.model.model_slices, ctx.index
        if index + 1 < len(shards):
            shards[index + 1].backward_drop()
        else:
            # the first border may have no backward (inputs without gradients), and parameters of one slice may be
            # those of another one, which has its backward later
            for shard in shards:
                Variable._execution_engine.queue_callback(shard.backward_drop)  # type: ignore[attr-defined]
        if index >= 0:
            shards[index].backward_load()
        return (None, None, None, *grads)


# The border does it for checkpointed slices, too: fairscale has a function of its own for these.
OffloadFunction = ShardSyncLayer


class OffloadModel(nn.Module):
    """Runs a sequential model one slice at a time on a device, and keeps the rest elsewhere.

    Sources: Pudipeddi et al., "Training Large Neural Networks with Constant Memory using a New Execution Algorithm"
    (2020); Ren et al., "ZeRO-Offload" (2021). The optimizer steps where parameters rest.

    Where it departs from fairscale's: it needs no CUDA; slices may take and return several tensors; shapes of outputs
    stay (fairscale drops a last dimension of 1 with ``checkpoint_activation``); dropout draws the same numbers twice
    in every slice; batch norms track their statistics once; microbatches work without ``checkpoint_activation``.

    Args:
        model: an nn.Sequential, or a list of modules, which are the slices (of ``auto_shard.shard_model``).
        device: where slices compute.
        offload_device: where they rest.
        num_slices: into how many slices of about equal size a Sequential is cut.
        checkpoint_activation: keep only what goes from slice to slice, in host memory, and compute the rest again.
        num_microbatches: each slice runs the batch (dimension 0 of its inputs) in so many parts.
    """

    def __init__(
        self,
        model: nn.Sequential | list[nn.Module],
        device: torch.device,
        offload_device: torch.device = torch.device("cpu"),  # noqa: B008
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(model, (nn.Sequential, list)) or len(model) == 0:
            raise ConfigurationError(
                f"model is a {type(model).__name__}; OffloadModel takes an nn.Sequential or a list of modules"
            )
        if device is None or num_slices < 1 or num_microbatches < 1:
            raise ConfigurationError(
                f"device={device}, num_slices={num_slices}, num_microbatches={num_microbatches}: name a device and "
                "numbers above 0"
            )
        parts = (
            model if isinstance(model, list) else [nn.Sequential(*s) for s in split_layers(model, num_slices)]
        )
        self.device = torch.device(device)
        self.offload_device = torch.device(offload_device)
        self.model_slices: list[ModelShard] = [
            ModelShard(part, self.device, self.offload_device, i) for i, part in enumerate(parts)
        ]
        if checkpoint_activation:
            for shard in self.model_slices:
                checkpoint_wrapper(shard, offload_to_cpu=self.offload_device.type == "cpu")
        self._model = nn.Sequential(*self.model_slices)
        self._num_microbatches = num_microbatches

    def forward(self, *inputs: Tree, **_: object) -> Tree:
        """Returns the model's output, on the device; one tensor or a tuple."""
        anchor = torch.empty(0, device=self.device, requires_grad=torch.is_grad_enabled())
        values: Sequence[Tree] = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in inputs]
        for index, shard in enumerate(self.model_slices):
            values = self._run(shard, self._border(index - 1, anchor, values))
        values = self._border(len(self.model_slices) - 1, anchor, values)
        return values[0] if len(values) == 1 else tuple(values)

    def _border(self, index: int, anchor: torch.Tensor, values: Sequence[Tree]) -> list[Tree]:
        """Returns the values behind a slice; tensors among them went over the border."""
        tensors = iter(
            ShardSyncLayer.apply(self, index, anchor, *(v for v in values if isinstance(v, torch.Tensor)))
        )
        return [next(tensors) if isinstance(v, torch.Tensor) else v for v in values]

    def _run(self, shard: nn.Module, values: list[Tree]) -> Args:
        if self._num_microbatches == 1:
            return _as_tuple(shard(*values))
        chunked = [
            v.chunk(self._num_microbatches) if isinstance(v, torch.Tensor) and v.dim() > 0 else None
            for v in values
        ]
        count = max((len(c) for c in chunked if c is not None), default=1)
        outputs = []
        for i in range(count):
            part = [v if c is None else c[i] for v, c in zip(values, chunked, strict=True)]
            outputs.append(_as_tuple(shard(*part)))
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def _as_tuple(value: Tree) -> Args:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def split_layers(modules: nn.Sequential, number_splits: int) -> list[list[nn.Module]]:
    """Cuts layers in order: a new slice begins where the next layer would take one beyond its share of parameters."""
    sizes = [sum(p.numel() for p in m.parameters()) for m in modules]
    count = min(len(modules), number_splits)
    share = sum(sizes) // count
    splits: list[list[nn.Module]] = [[]]
    held = 0
    for layer, size in zip(modules, sizes, strict=True):
        if held > 0 and held + size > share and len(splits) < count:
            splits.append([])
            held = 0
        splits[-1].append(layer)
        held += size
    return splits
