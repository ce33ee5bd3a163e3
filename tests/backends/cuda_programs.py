"""What CUDA tests run on each rank; what needs no GPU takes the backend's name, so that it can be tried on others."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from shardkit import FSDP, OSS, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy, ShardedDDP
from shardkit.backend import get_backend
from shardkit.nn import FullyShardedDataParallel
from tests.beside import assert_same, mean_square, steps_beside
from tests.fsdp_models import MODELS, batch, build

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard": ReshardPolicy(after_forward=False)},
    "two ahead": {"reshard": ReshardPolicy(prefetch=2)},
    "offloaded": {"offload": OffloadPolicy(parameters=True)},
    "masters": {"offload": OffloadPolicy(masters=True, activations=True)},
    "bf16": {
        "precision": PrecisionPolicy(compute=torch.bfloat16),
        "reduce": ReducePolicy(dtype=torch.float32),
    },
}


# ------------------------------------------------------------------ two ranks on one device
def over_gloo(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Starts a rank on the first device; gloo carries the tensors."""
    _start_on_first_device("gloo", rank, world_size, rendezvous)


def over_nccl(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Starts a rank on the first device; NCCL takes the ranks for machines of their own and uses sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    }  # fmt: skip
    library = backend if ":" in backend else "nccl"
    _start_on_first_device(library, rank, world_size, rendezvous)


def sanitized(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """As :func:`over_nccl`; torch looks for accesses that no stream orders, and raises."""
    import torch.cuda._sanitizer as sanitizer

    sanitizer.enable_cuda_sanitizer()
    over_nccl(rank, world_size, rendezvous, backend)


def over_both(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """As :func:`over_nccl`, with gloo for the CPU; random numbers are the CPU's, as in the process that compares."""
    for name in ("uniform_", "normal_", "random_", "bernoulli_", "exponential_"):
        setattr(torch.Tensor, name, _drawn_on_the_host(getattr(torch.Tensor, name)))
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, check_device=False)
    torch.backends.cudnn.allow_tf32 = False
    over_nccl(rank, world_size, rendezvous, "cpu:gloo,cuda:nccl")


def _drawn_on_the_host(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.is_cuda:
            return draw(self, *args, **kwargs)
        with torch.no_grad():
            return self.copy_(draw(torch.empty_like(self, device="cpu"), *args, **kwargs))

    return drawn


class MadeOnDevice(TorchFunctionMode):
    """Makes tensors on the current CUDA device where no device is named; random ones are drawn on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func not in _RANDOM:
            return func(*args, **kwargs | {"device": "cuda"})
        is_trained = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).cuda().requires_grad_(is_trained)


_RANDOM = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def _start_on_first_device(library: str, rank: int, world_size: int, rendezvous: str) -> None:
    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), world_size, is_master=False, wait_for_workers=False)
    dist.init_process_group(library, store=store, rank=rank, world_size=world_size)


# ------------------------------------------------------------------ training
def train_fsdp(rank: int, world_size: int, name: str, options: str, backend: str = "cuda") -> None:
    """Against one process on the CPU."""
    device = get_backend(backend).device()
    make, wrap = MODELS[name]
    plain = build(make)
    given = dict(OPTIONS[options])
    if options == "offloaded":
        given["device"] = device
    model = build(make).to(device)
    if name.startswith("tied"):
        model.head.weight = model.embed.weight
    model = wrap(model, lambda m: FSDP(m, **given))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        x = batch(step, world_size)[r]
        return m(x if m is plain else x.to(device)).float().square().mean()

    def clip() -> None:
        model.clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

    steps_beside(rank, world_size, model, plain, loss, optimizers, range(4), clip)
    tolerance = 3e-2 if options == "bf16" else 1e-4
    assert_same(model, plain, name, tolerance, tolerance)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 11, bias=False), nn.Linear(11, 3))


def train_sharded_ddp(rank: int, backend: str = "cuda") -> None:
    """Against one process, on 2 ranks."""
    plain, inner = build(_mlp), build(_mlp).to(get_backend(backend).device())
    oss = OSS(inner.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def clip() -> None:
        oss.clip_grad_norm(0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

    model = ShardedDDP(inner, oss)
    steps_beside(rank, 2, model, plain, mean_square, [oss, optimizer], range(3), clip)
    assert_same(model, plain, f"rank {rank}", 1e-4, 1e-5)


def _layers(count: int, width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]).to(device)


def _sharded_layers(count: int, width: int, where: torch.device, **options: Any) -> FSDP:
    model = _layers(count, width, where)
    for i in range(count):
        model[i] = FSDP(model[i], **options)
    return FSDP(model, **options)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.skip = nn.Linear(16, 16), nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x) if self.skip else self.a(x) + self.b(x))


def one_rank_leaves_a_parameter_out(rank: int, backend: str = "cuda") -> None:
    """Communicators are used in one order all the same."""
    device = get_backend(backend).device()
    torch.manual_seed(0)
    blocks = [_Two().to(device) for _ in range(4)]
    blocks[3].skip = rank == 0
    model = FSDP(nn.Sequential(*[FSDP(b) for b in blocks]))
    for _ in range(3):
        model(torch.randn(4, 16, device=device)).pow(2).mean().backward()
    get_backend(backend).synchronize()


def a_late_rank(rank: int, seconds: float, backend: str = "cuda") -> None:
    """Communicators are connected while the other rank waits."""
    device = get_backend(backend).device()
    model = _layers(2, 16, device)
    if rank:
        time.sleep(seconds)
    group = dist.new_group()
    wrapped = ShardedDDP(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1, group=group), group=group)
    wrapped(torch.randn(4, 16, device=device)).sum().backward()


def as_in_the_tutorial(rank: int) -> str:
    """``.to(rank)``, and nobody calls set_device."""
    os.environ.pop("LOCAL_RANK", None)
    model = _layers(2, 16, torch.device("cuda", rank))
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDDP(model, optimizer)
    wrapped(torch.randn(4, 16).to(rank)).sum().backward()
    optimizer.step()
    return str(get_backend("cuda").device())


def without_a_device(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Starts a rank that has chosen no device."""
    os.environ.pop("LOCAL_RANK", None)
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(host, int(port), world_size, is_master=False, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)


# ------------------------------------------------------------------ one rank on one device
def memory_when_the_host_runs_ahead(rank: int) -> None:
    """It is that of a run in which the host waits after every step."""
    device = get_backend("cuda").device()
    # alone, a rank gathers nothing unless the dtype differs
    model = _sharded_layers(8, 2048, device, precision=PrecisionPolicy(compute=torch.bfloat16))
    x, peak = torch.randn(64, 2048, device=device), {}
    for waits in (True, False):
        for step in range(6):
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            if not waits:
                torch.cuda._sleep(100_000_000)
            model(x).float().pow(2).mean().backward()
            model.zero_grad()
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        peak[waits] = torch.cuda.max_memory_allocated()
    assert peak[False] < 1.02 * peak[True], peak


def offloaded_shards(rank: int) -> None:
    """They are pinned; the program may write to them as soon as forward has returned, however late the device is."""
    device = get_backend("cuda").device()
    options: dict[str, Any] = {"offload": OffloadPolicy(parameters=True), "device": device}
    model = _sharded_layers(2, 1024, device, **options)
    assert all(p.is_pinned() for p in model.parameters())
    x = torch.randn(8, 1024, device=device)
    with torch.no_grad():
        wanted = model(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        found = model(x)
        for p in model.parameters():
            p.fill_(torch.nan)
    torch.testing.assert_close(found, wanted)
    # fairscale's way: the module stays on the CPU
    fairscales = FullyShardedDataParallel(nn.Linear(8, 8), move_params_to_cpu=True)
    assert fairscales(x[:, :8]).device == device
    assert next(fairscales.parameters()).device.type == "cpu"


def moved_after_wrapping(rank: int, backend: str = "cuda") -> None:
    """The module gets the device's groups with it."""
    device = get_backend(backend).device()
    model = _sharded_layers(2, 16, torch.device("cpu"))
    assert model._state.group.backend.name == "gloo"
    model.to(device)
    model(torch.randn(4, 16, device=device)).sum().backward()
    assert model._state.group.backend.name == backend


def a_step_without_host_synchronization(rank: int) -> None:
    """torch raises at the first one."""
    device = get_backend("cuda").device()
    sharded = _sharded_layers(3, 256, device, precision=PrecisionPolicy(compute=torch.bfloat16))
    plain = _layers(3, 256, device)
    optimizer = OSS(plain.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    for model, steps in (
        (sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)),
        (ShardedDDP(plain, optimizer), optimizer),
    ):
        x = torch.randn(8, 256, device=device)
        for step in range(4):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                model(x).float().pow(2).mean().backward()
                steps.step()
                steps.zero_grad()
            finally:
                if step == 3:
                    torch.cuda.set_sync_debug_mode("default")


def scaled_checkpointed_compiled(rank: int) -> None:
    """autocast, the gradient scaler, checkpoints (offloaded, too), clipping, a fused optimizer, torch.compile."""
    from shardkit.nn import checkpoint_wrapper
    from shardkit.optim.grad_scaler import ShardedGradScaler

    device = get_backend("cuda").device()
    model = _layers(4, 128, device)
    for i in range(4):
        inner = nn.Sequential(model[i], nn.Dropout(0.1))
        model[i] = FSDP(checkpoint_wrapper(inner, offload_to_cpu=i % 2 == 0))
    wrapped = FSDP(model)
    optimizer, scaler = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True), ShardedGradScaler()
    losses = []
    for step in range(8):
        optimizer.zero_grad()
        torch.manual_seed(step)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = wrapped(torch.randn(64, 128, device=device)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        wrapped.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    compiled = FSDP(torch.compile(_layers(2, 128, device)))
    out = compiled(torch.randn(8, 128, device=device))
    out.sum().backward()
    assert bool(torch.isfinite(out).all())
