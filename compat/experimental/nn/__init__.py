"""fairscale.experimental.nn, its mevo, offload, auto_shard and sync_batchnorm included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable
from torch.fx.node import Node
from torch.nn.modules.batchnorm import _BatchNorm

from shardkit.backend import Group, backend_for
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.model_parallel.vocab_loss import Margin, linear_cross_entropy
from shardkit.pipeline.microbatch import replace_batch_norms
from shardkit.torch_seams.tensors import move_buffers
from shardkit.types import Args, Context, ProcessGroup, Tree
from shardkit.wrapping.activations import checkpoint_wrapper, is_recomputing, once

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "OffloadModel", "SyncBatchNorm"]


# ------------------------------------------------------------ projection and loss of a large vocabulary, tile by tile
# The computation is :func:`shardkit.model_parallel.vocab_loss.linear_cross_entropy`. Gradients of the weight go
# through autograd, where fairscale's code writes to ``weight.grad`` itself; hooks (of FSDP, of data parallel wrappers)
# see them.
DEBUG = False  # fairscale's; nothing is printed here


def get_data(
    shape: tuple[tuple[int, int], tuple[int, int]],
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes random input [tokens, D], weight [words, D] and targets [tokens] of shape ((tokens, D), (D, words))."""
    (tokens, width), (same_width, words) = shape
    if width != same_width:
        raise ConfigurationError(f"shapes {shape[0]} and {shape[1]} can't be multiplied")
    input = torch.rand(tokens, width, device=device, dtype=dtype).requires_grad_(True)
    weight = nn.Linear(width, words, bias=False, device=device, dtype=dtype).weight
    return input, weight, torch.randint(words, (tokens,), device=device)


T = TypeVar("T")


def _rows(input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return input.reshape(-1, input.shape[-1]), target.reshape(-1)


def _tile(n: int, factor: int) -> int:
    """Returns the power of two next above n / factor, at most n: fairscale's size of tiles."""
    return min(1 << max(n // max(factor, 1) - 1, 0).bit_length(), max(n, 1))


def lmcl_matmul(
    i: torch.Tensor, w: torch.Tensor, tgt: torch.Tensor, w_idx: int, margin: float, scale: float | None
) -> torch.Tensor:
    """[t, D], [v, D], [t] -> [t, v]: cosines less the margin at the targets, times the scale.

    Args:
        w_idx: which tile of the vocabulary ``w`` is; all before it have its size.
    """
    cosines = F.normalize(i, dim=1) @ F.normalize(w, dim=1).T
    own = torch.arange(len(w), device=w.device) + w_idx * len(w) == tgt.reshape(-1, 1)
    return (cosines - margin * own) * (1.0 if scale is None else scale)


class BaselineSoftmax(nn.Module):
    """The plain way: all logits, and a softmax in fp32.

    Args:
        proj_weight: [V, D].
        tile_factor: ignored; it is that of MemoryEfficientVocabOutput.
        log_softmax: log-probabilities, not probabilities.
        margin: of the large margin cosine loss.
        scale: of the large margin cosine loss; None: a plain loss.
    """

    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 0,
        log_softmax: bool = True,
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        words, width = proj_weight.shape
        self.fc = nn.Linear(width, words, bias=False, device="meta")
        self.fc.weight = proj_weight
        self.log_softmax, self.margin, self.scale = log_softmax, margin, scale

    def lmcl_pre_softmax(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns logits of the large margin cosine loss, [T, V]."""
        return lmcl_matmul(input, self.fc.weight, target, 0, self.margin, self.scale)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[..., D] and [...] -> [T, V] in fp32."""
        input, target = _rows(input, target)
        logits = self.fc(input) if self.scale is None else self.lmcl_pre_softmax(input, target)
        softmax = F.log_softmax if self.log_softmax else F.softmax
        return softmax(logits, dim=-1, dtype=torch.float32)


class BaselineSoftmaxNllLoss(BaselineSoftmax):
    """:class:`BaselineSoftmax` and the sum of the negative log-likelihoods."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """[..., D] and [...] -> []."""
        return F.nll_loss(super().forward(input, target), target.reshape(-1), reduction="sum")


class BackwardTriggerFn(torch.autograd.Function):
    """``apply(weight, trigger)`` -> the weight; backward gives the trigger a gradient of zero as well."""

    @staticmethod
    def forward(ctx: Context, w: torch.Tensor, trigger_tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(trigger_tensor)
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Context, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return args[0], torch.zeros_like(ctx.saved_tensors[0])


class BackwardTrigger(nn.Module):
    """Hands out a parameter of another module; its own parameter gets a gradient (of zero) when that one does.

    Not needed any more, since the weight's own hooks see its gradient; state dicts hold it.
    """

    def __init__(self, linked_param: torch.Tensor) -> None:
        super().__init__()
        self.trigger = nn.Parameter(torch.rand(1, dtype=linked_param.dtype, device=linked_param.device))
        self.__dict__["_linked_param"] = linked_param  # not a parameter of this module

    def forward(self) -> torch.Tensor:
        return BackwardTriggerFn.apply(self._linked_param, self.trigger)


class MemoryEfficientVocabOutput(nn.Module):
    """Linear layer, softmax and negative log-likelihood, tile by tile; ``MEVO`` for short.

    Args:
        proj_weight: [V, D], usually the embedding's as well.
        tile_factor: into how many tiles tokens and vocabulary are cut (sizes are powers of two).
        reduction: "sum" or "mean" over all tokens.
        margin: of the large margin cosine loss.
        scale: of the large margin cosine loss; None: a plain loss.
    """

    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 16,
        reduction: str = "sum",
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("sum", "mean"):
            raise ConfigurationError(f'reduction is {reduction!r}; it is "sum" or "mean"')
        self.proj_weight = proj_weight
        self.tf_in, self.tf_w = tile_factor, tile_factor
        self.reduction = reduction
        self.margin, self.scale, self.log_softmax = margin, scale, True
        self.trigger = BackwardTrigger(proj_weight)

    def get_target_nlprob(
        self,
        i: torch.Tensor,
        w: torch.Tensor,
        target: torch.Tensor,
        debase_max: torch.Tensor,
        exp_sums: torch.Tensor,
    ) -> torch.Tensor:
        """Sums the targets' negative log-probabilities, given each token's maximum and sum of exponentials."""
        logits = (i * F.embedding(target, w)).float().sum(1)
        if self.scale is not None:
            cosines = F.cosine_similarity(i, F.embedding(target, w), dim=1).float()
            logits = (cosines - self.margin) * self.scale
        log_probabilities = logits - debase_max - exp_sums.log()
        return -(log_probabilities if self.log_softmax else log_probabilities.exp()).sum()

    def eval_forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns logits [..., V], without margin and scale."""
        return input @ self.proj_weight.T

    def forward(self, input: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        """[..., D] and [...] -> the loss; in eval mode, without a target, the logits.

        Raises:
            ConfigurationError: there is no target, and the module is in training mode.
        """
        if target is None:
            if self.training:
                raise ConfigurationError("a loss needs targets; for logits call eval() first")
            return self.eval_forward(input)
        input, target = _rows(input, target)
        weight = BackwardTriggerFn.apply(self.proj_weight, self.trigger.trigger)
        return linear_cross_entropy(
            input,
            weight,
            target,
            tokens_per_tile=_tile(len(input), self.tf_in),
            words_per_tile=_tile(len(self.proj_weight), self.tf_w),
            reduction=self.reduction,
            margin=None if self.scale is None else Margin(self.margin, self.scale),
        )


MEVO = MemoryEfficientVocabOutput


# ------------------------------------------------------------ a sequential model that is on the device slice by slice
# FSDP with offloading (``shardkit.OffloadPolicy``) serves any model and any number of ranks; this class needs one rank
# and an ``nn.Sequential``.
#
# [Note: what backward needs] Autograd saves views of weights, which would keep a slice's memory on the device between
# its forward and its backward. What is saved of a parameter here is which one and which view; backward takes that from
# the slice, which is on the device again by then.
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


# ------------------------------------------------------------ a model as a chain of modules of about equal size
# ``torch.distributed.pipelining`` cuts models for pipelines, with values that skip stages; a chain, as OffloadModel
# takes it, hands exactly one value from module to module.
class _ExtendedLeafTracer(torch.fx.Tracer):
    def __init__(self, leaf_modules: set[nn.Module]) -> None:
        super().__init__()
        self.leaf_modules = leaf_modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or m in self.leaf_modules


def _trace(model: nn.Module) -> torch.fx.Graph:
    """Returns the model's graph; modules that can't be traced (control flow on values) stay whole."""
    leaves: set[nn.Module] = set()
    # from the inside out: a module that contains one that can't be traced may be traced itself then
    for module in reversed(list(model.modules())):
        tracer = _ExtendedLeafTracer(leaves)
        if module is model or tracer.is_leaf_module(module, ""):
            continue
        try:
            tracer.trace(module)
        except (TypeError, torch.fx.proxy.TraceError):
            leaves.add(module)
    return _ExtendedLeafTracer(leaves).trace(model)


def shard_model(model: nn.Module, shard_count: int = 3) -> list[torch.fx.GraphModule]:
    """Cuts a model into at most so many modules; applied one after the other they are the model.

    A cut is made where a module has more than its share of the parameters, as soon as exactly one value goes on;
    where values skip (residual connections), fewer modules come out. Parameters stay the model's.

    Raises:
        ConfigurationError: ``shard_count`` below 1.
    """
    if shard_count < 1:
        raise ConfigurationError(f"shard_count is {shard_count}; it must be 1 or more")
    graph = _trace(model)
    *nodes, output = graph.nodes
    place = {node: i for i, node in enumerate(graph.nodes)}
    last_input = max((place[n] for n in nodes if n.op == "placeholder"), default=-1)
    share = sum(p.numel() for p in model.parameters()) // shard_count
    counted: set[nn.Parameter] = set()
    pieces: list[list[Node]] = [[]]
    held = 0  # by the last piece
    reach = -1  # up to where what was made before the current node is used
    for i, node in enumerate(nodes):
        pieces[-1].append(node)
        new = {p for p in _params_of(model, node) if p not in counted}
        counted |= new
        held += sum(p.numel() for p in new)
        own_reach = max((place[user] for user in node.users), default=-1)
        only_this_goes_on = reach <= i < own_reach and last_input <= i < len(nodes) - 1
        if held > share and only_this_goes_on and len(pieces) < shard_count:
            pieces.append([])
            held = 0
        reach = max(reach, own_reach)
    return [_module_of(model, pieces, i, output) for i in range(len(pieces))]


def _params_of(model: nn.Module, node: Node) -> list[nn.Parameter]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        found = getattr(model.get_submodule(owner), name)
        return [found] if isinstance(found, nn.Parameter) else []
    return []


def _module_of(model: nn.Module, pieces: list[list[Node]], index: int, output: Node) -> torch.fx.GraphModule:
    """Makes piece ``index`` a module of one argument, the value of the node before it (the first: the model's own)."""
    graph = torch.fx.Graph()
    made: dict[Node, Node] = {}
    if index > 0:
        made[pieces[index - 1][-1]] = graph.placeholder(f"placeholder{index}")
    for node in pieces[index]:
        made[node] = graph.node_copy(node, made.__getitem__)
    if index + 1 < len(pieces):
        graph.output(made[pieces[index][-1]])
    else:
        graph.node_copy(output, made.__getitem__)
    return torch.fx.GraphModule(model, graph)


# ------------------------------------------------------------ batch norm over all ranks
# torch.nn.SyncBatchNorm serves CUDA and torch.distributed only; this one talks through the backend of its input, CPU,
# XLA and ranks that are threads included.
#
# Legend of shapes: C channels, N values a channel on all ranks together, W world size.
class Statistics(NamedTuple):
    """Holds those of the batches of all ranks; [C] each, total is [1]; fp32, or fp64 for fp64 inputs."""

    mean: torch.Tensor
    var: torch.Tensor  # biased: divided by N
    total: torch.Tensor  # N


def _reduced_dims(input: torch.Tensor) -> list[int]:
    return [d for d in range(input.dim()) if d != 1]


@torch.no_grad()
def batch_statistics(input: torch.Tensor, group: Group) -> Statistics:
    """Returns mean and variance of each channel over all ranks; every rank calls it, also with an empty batch.

    One collective: each rank's mean and variance, which are combined with Chan's formula. E[x²] - E[x]², which sums
    alone would give, loses all digits where the mean is large.

    Args:
        input: [batch, C, ...].
    """
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    channels = x.shape[1]
    mine = x.new_zeros(2 * channels + 1)
    if x.numel() > 0:
        var, mean = torch.var_mean(x, _reduced_dims(x), correction=0)
        mine = torch.cat([mean, var, x.new_full((1,), x.numel() // channels)])
    everybody = x.new_empty(group.world_size * mine.numel())
    group.all_gather_into(everybody, mine, label="batch statistics")
    means, variances, counts = everybody.view(group.world_size, -1).split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    share = counts / count.clamp(min=1)  # [W, 1]
    mean = (means * share).sum(0)
    var = ((variances + (means - mean).square()) * share).sum(0)
    return Statistics(mean, var, count)


class _Normalizing(Context):
    group: Group


class _Normalize(torch.autograd.Function):
    """``apply(input, weight, bias, statistics, eps, group)``; backward goes through the statistics as well."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Normalizing,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: Statistics,
        eps: float,
        group: Group,
    ) -> torch.Tensor:
        mean, var, count = statistics
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + eps), count)  # type: ignore[arg-type]
        ctx.group = group
        if input.numel() == 0:
            return torch.zeros_like(input)
        # torch's kernel takes statistics that are wider than the input only with weights of their width
        if weight is None or weight.dtype != mean.dtype:
            weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
            bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: _Normalizing, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        input, weight, mean, invstd, count = ctx.saved_tensors
        dims = _reduced_dims(input)

        def along(values: torch.Tensor) -> torch.Tensor:  # [C] -> [1, C, 1, ...]
            return values.view(1, -1, *[1] * (input.dim() - 2))

        grad = grad_output.to(mean.dtype)
        normalized = (input.to(mean.dtype) - along(mean)) * along(invstd)
        of_bias = grad.sum(dims)  # [C]
        of_weight = (grad * normalized).sum(dims)  # [C]
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight])  # [2 C]
            ctx.group.all_reduce(sums, label="gradients of batch statistics")
            mean_grad, mean_product = (sums / count.clamp(min=1)).chunk(2)
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            grad_input = (grad - along(mean_grad) - normalized * along(mean_product)) * along(scale)
            grad_input = grad_input.to(input.dtype)
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = of_weight.to(weight.dtype)
        if weight is not None and ctx.needs_input_grad[2]:
            grad_bias = of_bias.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm of inputs [batch, C, ...] whose statistics in training are those of all ranks' batches together.

    Batches may differ in size between ranks, empty ones included. Gradients of weight and bias are those of the
    rank's own batch, as everywhere in data parallel training. Under activation checkpointing, statistics are
    exchanged and tracked once. Without ranks, and in eval mode, it is a plain batch norm.

    Where it departs from fairscale's: ``num_batches_tracked`` counts and ``momentum=None`` works; statistics are exact
    (fp32 at least, no cancellation) and take one collective in place of two; one checkpointed module may be called
    several times before backward.

    Args:
        process_group: whose ranks share statistics; default: all.
        *args, **kwargs: as of torch.nn.BatchNorm2d.
    """

    def __init__(self, *args: Tree, process_group: ProcessGroup = None, **kwargs: Tree) -> None:
        super().__init__(*args, **kwargs)
        self._process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigurationError(
                f"SyncBatchNorm of {self.num_features} channels got an input of shape {tuple(input.shape)}; "
                f"it takes [batch, {self.num_features}, ...]"
            )

    def _group(self, input: torch.Tensor) -> Group | None:
        """Returns the ranks to share statistics with; None: there are no others."""
        backend = backend_for([input])
        try:
            group = backend.group(self._process_group)
        except ConfigurationError:
            if self._process_group is not None:
                raise
            return None  # no ranks were started
        return group.channel("batch norm") if group.world_size > 1 else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        group = self._group(input) if self.training else None
        if group is None:
            return super().forward(input)
        statistics = once(lambda: batch_statistics(input, group))
        if self.track_running_stats and not is_recomputing():
            self._track(statistics)
        return _Normalize.apply(input, self.weight, self.bias, statistics, self.eps, group)

    @torch.no_grad()
    def _track(self, statistics: Statistics) -> None:
        mean, var, count = statistics
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: ProcessGroup = None) -> nn.Module:
        """Puts layers of this class in the place of all of torch's batch norms within a module.

        Parameters and buffers stay the same objects; so do layers that are used twice.

        Args:
            process_group: whose ranks share statistics; default: all.

        Returns:
            The module, or its replacement if it is a batch norm itself.
        """

        def make(old: _BatchNorm) -> SyncBatchNorm:
            options = old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats
            made = cls(*options, process_group=process_group)
            if hasattr(old, "qconfig"):
                made.qconfig = old.qconfig
            return made

        return replace_batch_norms(module, make)
