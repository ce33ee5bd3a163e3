"""What torch_xla's own test programs of FSDP do, by both libraries in the same replicas: equal to the bit in fp32."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.pools import on_ranks, rank_pool
from tests.xla.models import batch, build

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

Wrap = Callable[..., Any]


class Chain(nn.Module):
    """Frozen, or tied, as asked for."""

    def __init__(self, frozen: str = "", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=not tied)
        if tied:
            self.second.weight = self.first.weight
        for name, p in self.named_parameters():
            p.requires_grad_(not frozen or name not in frozen.split())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Two(nn.Module):
    """Backward goes through one of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.unused = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


class Buffers(nn.Module):
    """Notes which dtypes it is called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(5, 5)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.ones(5, dtype=dtype))
        self.seen: list[torch.dtype] = []
        self.computes_in = torch.float32

    def forward(self, inputs: dict[str, torch.Tensor], *, scale: torch.Tensor) -> list[Any]:
        self.seen = [inputs["x"].dtype, scale.dtype, *(b.dtype for b in self.buffers())]
        x = inputs["x"].to(self.computes_in)
        return [self.linear(x), {"rest": (self.linear(x) * 2, "text", None)}]


def _state(model: Any) -> dict[str, Any]:
    import torch_xla

    torch_xla.sync()
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    return {**state, "trainable": [(n, p.requires_grad) for n, p in model.named_parameters()]}


def _gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]


def _steps(
    model: Any, x: torch.Tensor, loss: Callable[[Any], torch.Tensor] = lambda y: y.square().mean()
) -> None:
    import torch_xla

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # frozen ones too
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
        torch_xla.sync()


# ------------------------------------------------------------------ cases
def _frozen(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    """A weight, flattened and not; all of an inner unit; all of the root."""
    everything = "first.weight first.bias second.weight second.bias"
    for flat in (False, True):
        model = wrap(Chain("first.weight"), flatten_parameters=flat)
        _steps(model, x)
        assert not any(p._has_full_param for p in model.full_params)
        yield _state(model)
    inner = wrap(Chain(everything))
    model = wrap(nn.Sequential(nn.Linear(5, 5), inner, wrap(nn.Linear(5, 2))))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    _steps(model, x)
    assert not any(p._has_full_param for m in (model, inner) for p in m.full_params)
    yield _state(model)
    model = wrap(Chain(everything), flatten_parameters=True)
    inputs = x.clone().requires_grad_()
    model(inputs).sum().backward()
    yield [inputs.grad.cpu(), _gradients(model), _state(model)]  # type: ignore[union-attr]


def _unused(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    from torch_xla.distributed.fsdp.wrap import always_wrap_policy

    model = wrap(Two(), auto_wrap_policy=always_wrap_policy)
    _steps(model, x, lambda outputs: outputs[0].sum())
    assert not model.unused.has_full_params
    assert not any(p._has_full_param for p in [*model.used.full_params, *model.unused.full_params])
    yield [_gradients(model), _state(model)]


def _accumulated(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    model = wrap(Chain())
    with model.no_sync():
        model(x).sum().backward()
    for _ in range(2):
        model(x * 2).sum().backward()
        yield _gradients(model)
    for p in (2.0, 1.0):
        model(x).sum().backward()
        yield [model.clip_grad_norm_(0.5, p).cpu(), _gradients(model)]
    model.eval()
    with torch.no_grad():
        yield model(x).cpu()


def _divided(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    for factors in ((4.0, 1.0), (1, 1), (1.0, 2.0)):
        model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Tanh()))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        model.set_gradient_divide_factors(*factors, recursive=True)
        model(x).sum().backward()
        yield [model.gradient_predivide_factor, model.gradient_postdivide_factor, _gradients(model)]


def _options(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    """Those that say how, and not what."""
    hows: list[dict[str, Any]] = [
        {"shard_param_on_dim_0": True, "coalesce_all_gather_ops": True, "reduce_scatter_bucket_size_mb": 1},
        {"_shard_size_multiple": 4, "sync_on_finalization": True, "reshard_after_forward": False},
        {
            "flatten_parameters": True, "optimization_barrier_in_forward": False, "disable_reshard_on_root": False,
            "optimization_barrier_in_backward": False, "_use_xla_patched_linear": False, "_debug_msg": "here",
        },
    ]  # fmt: skip
    for how in hows:
        model = wrap(Chain("second.bias"), **how)
        _steps(model, x)
        yield _state(model)


def _dtypes(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    for compute, buffers in (
        (None, None),
        (torch.float32, None),
        (torch.bfloat16, torch.float32),
        (None, torch.bfloat16),
    ):
        inner = Buffers()
        inner.computes_in = compute or torch.float32
        model = wrap(inner, compute_dtype=compute, buffer_dtype=buffers)
        for given in (x, x.to(torch.bfloat16)):
            first, rest = model({"x": given}, scale=torch.ones(2, dtype=torch.float64, device=x.device))
            assert rest["rest"][1:] == ("text", None)
            yield inner.seen
        yield [{k: v.dtype for k, v in model.state_dict().items()}, model.compute_dtype, model.buffer_dtype]
        if compute is None:
            (first.float().sum() + rest["rest"][0].float().sum()).backward()
            yield _gradients(model)


def _tied(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    for flat in (False, True):
        model = wrap(Chain(tied=True), flatten_parameters=flat)
        _steps(model, x)
        state = _state(model)
        yield state
        fresh = wrap(Chain(tied=True), flatten_parameters=flat)
        assert not any(fresh.load_state_dict({k: v for k, v in state.items() if k != "trainable"}))
        yield [_state(fresh), fresh(x).detach().cpu()]


def _names(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    for flat in (False, True):
        model = wrap(build(), flatten_parameters=flat)
        named = model.get_original_names_and_sharded_parameters()
        yield [(n, p.shape) for n, p in named]
        yield [n for n, _ in model.named_modules()]
        yield [list(p.shape) for p in model.sharded_params]
        if not flat:
            yield [(path, type(m).__name__, n) for path, m, n in model.full_param_infos]
            yield [list(p.shape) for p in model.full_params if model._is_root]
        yield [repr(model.training_state), model.xla_device, model.world_size, model.rank, model.extra_repr()]
        yield [type(model.module.module).__name__, len(model.params_with_grad)]


def _evaluated(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    """Inputs that want gradients, several forwards a backward, evaluation between steps."""
    torch.manual_seed(4)
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.BatchNorm1d(5), wrap(Chain())))
    inputs = x.clone().requires_grad_()
    (model(inputs).sum() + model(inputs * 2).square().sum()).backward()
    yield [inputs.grad.cpu(), _gradients(model)]  # type: ignore[union-attr]
    model.to(x.device)
    model.eval()
    with torch.no_grad():
        yield [model(x).cpu(), _state(model)]


def _autocast(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Tanh()))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    with torch.autocast("xla", dtype=torch.bfloat16):
        outputs = model(x)
    outputs.float().square().mean().backward()
    yield [outputs.dtype, outputs.detach().cpu(), _gradients(model)]


def _computed_again(wrap: Wrap, x: torch.Tensor) -> Iterator[Any]:
    """Dropout inside of a checkpoint; groups, a schedule and clipping around it."""
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed import fsdp as theirs

    from shardkit.xla import fsdp as ours

    library = ours if wrap.func is ours.XlaFullyShardedDataParallel else theirs  # type: ignore[attr-defined]
    torch.manual_seed(5)
    inner = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5))
    model = wrap(nn.Sequential(nn.Linear(5, 5), wrap(library.checkpoint_module(inner)), nn.Tanh()))
    decayed = [
        [p for n, p in model.named_parameters() if n.endswith("bias") is bias] for bias in (False, True)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": decayed[0]}, {"params": decayed[1], "weight_decay": 0.0}], lr=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    xm.set_rng_state(11)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        yield [model.clip_grad_norm_(0.3).cpu(), _gradients(model)]
        optimizer.step()
        schedule.step()
    yield _state(model)


# Sums in another order; bf16 that torch_xla's patched linear layers round elsewhere. Else none.
TOLERANCES = {"_evaluated": 1e-6, "_autocast": 1e-2}
CASES = (
    _evaluated,
    _autocast,
    _computed_again,
    _frozen,
    _unused,
    _accumulated,
    _divided,
    _options,
    _dtypes,
    _tied,
    _names,
)


def _run(rank: int) -> dict[str, list[Any]]:
    """What each library gives for each case."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

    from shardkit.xla.fsdp import XlaFullyShardedDataParallel as Ours

    x = batch(rank).to("xla")
    once = {"execute_sharding_on_init": False}  # as many programs less to compile
    sides = [
        functools.partial(Theirs, pin_layout_in_collective_ops=False, **once),
        functools.partial(Ours, **once),
    ]
    found: dict[str, list[Any]] = {}
    for case in CASES:
        found[case.__name__] = [list(case(wrap, x)) for wrap in sides]
    return found


def _differences(a: Any, b: Any, path: str, tolerance: float = 0.0) -> Iterator[str]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{path}: {a.shape} {a.dtype}, {b.shape} {b.dtype}"
        elif not torch.equal(a, b) and (a - b).abs().max() > tolerance:
            yield f"{path}: by {(a - b).abs().max()} of {a.abs().max()}"
    elif isinstance(a, dict) and isinstance(b, dict):
        yield from (f"{path}: {key!r} in one alone" for key in a.keys() ^ b.keys())
        for key in a.keys() & b.keys():
            yield from _differences(a[key], b[key], f"{path}.{key}", tolerance)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{i}]", tolerance)
    elif a != b:
        yield f"{path}: torch_xla {a}, shardkit {b}"


def test_programs_give_the_same_to_the_bit() -> None:
    for rank, found in enumerate(rank_pool(2, "xla").run(_run)):
        wrong = []
        for case, sides in found.items():
            wrong += _differences(*sides, f"rank {rank}: {case}", TOLERANCES.get(case, 0.0))
        assert not wrong, "\n".join(wrong)


def test_every_argument_and_public_method_is_there() -> None:
    from torch_xla.distributed import fsdp as theirs
    from torch_xla.distributed.fsdp import wrap as their_wrap

    from shardkit.xla import fsdp as ours
    from shardkit.xla.fsdp import state_dict_utils, utils, wrap, xla_flatten_params_wrapper

    name = "XlaFullyShardedDataParallel"
    a, b = getattr(theirs, name), getattr(ours, name)
    assert set(theirs.__all__) <= set(ours.__all__)
    for method in [m for m in vars(a) if not m.startswith("_") and callable(getattr(a, m))] + ["__init__"]:
        wanted, there = (inspect.signature(getattr(c, method)).parameters for c in (a, b))
        if any(p.kind is p.VAR_POSITIONAL for p in there.values()):
            continue
        positional = [p for p in there.values() if p.kind is not p.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in wanted.values()], (
            method
        )
    for function in (
        "always_wrap_policy",
        "lambda_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "recursive_wrap",
    ):
        assert list(inspect.signature(getattr(wrap, function)).parameters) == list(
            inspect.signature(getattr(their_wrap, function)).parameters
        )
    for module, names in (
        (utils, ["apply_xla_patch_to_nn_linear", "BucketizedReduceScatter", "dummy_all_gather"]),
        (xla_flatten_params_wrapper, ["XlaFlattenParamsWrapper", "FlatParameter"]),
        (state_dict_utils, ["consolidate_sharded_state_dicts"]),
    ):
        assert all(callable(getattr(module, n)) for n in names)
        with contextlib.suppress(AttributeError):
            raise AssertionError(module.nothing)


@on_ranks((2, "xla"))
def test_mistakes_have_torch_xlas_types_of_errors(rank: int) -> None:
    """torch_xla's types of errors, so that what catches them still does."""
    from shardkit.xla.fsdp import XlaFullyShardedDataParallel as Ours
    from shardkit.xla.fsdp.wrap import always_wrap_policy

    model = Ours(nn.Sequential(Ours(nn.Linear(2, 2)), nn.Tanh()))
    model(torch.ones(1, 2, device="xla")).sum().backward()
    with pytest.raises(RuntimeError, match="already"):
        Ours(model)
    with pytest.raises(RuntimeError, match="forward"):
        Ours(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    with pytest.raises(ValueError, match="compute_dtype"):
        Ours(nn.Linear(2, 2), compute_dtype=torch.float64)
    with pytest.raises(ValueError, match="buffer_dtype"):
        Ours(nn.Linear(2, 2), buffer_dtype=torch.int32)
    with pytest.raises(ValueError, match="sharding_rank"):
        Ours(nn.Linear(2, 2), sharding_groups=[[0, 1]])
    with pytest.raises((ValueError, RuntimeError), match="already"):
        Ours(nn.Sequential(Ours(nn.Linear(2, 2))), auto_wrap_policy=always_wrap_policy)
    with pytest.raises(AssertionError, match="outermost"):
        model.module[0].clip_grad_norm_(1.0)
    with pytest.raises(AssertionError, match="outermost"), model.module[0].no_sync():
        pass
    with pytest.raises((ValueError, RuntimeError), match="state"):
        model.assert_state(type(model.training_state).FORWARD)
