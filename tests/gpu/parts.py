"""Costs of single things: odd addresses, communicators, uneven parts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from shardkit.backend import ReduceOp, get_backend

CHANNELS = ("control", "buffers", "parameters", "gradients")


def _microseconds(device: str, call: Callable[[], object], times: int) -> float:
    for _ in range(3):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times * 1e6


def alignment(device: str) -> Iterator[dict[str, Any]]:
    """Matrix products and copies over weights that begin some elements after an aligned address."""
    width, rows, times = (4096, 512, 50) if device == "cuda" else (16, 4, 2)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(width, width, device=device, dtype=dtype)
        base = torch.randn(width * width + 64, device=device, dtype=dtype)
        sources = [torch.randn(width * rows, device=device, dtype=dtype) for _ in range(8)]
        target = torch.empty(width * rows * 8 + 64, device=device, dtype=dtype)
        for offset in (0, 1, 2, 4, 8):
            weight = base[offset : offset + width * width].view(width, width)
            pieces = list(target[offset : offset + width * rows * 8].split(width * rows))
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "offset": offset * dtype.itemsize,
                "linear": _microseconds(device, functools.partial(functional.linear, x, weight), times),
                "input gradient": _microseconds(device, functools.partial(torch.matmul, x, weight), times),
                "foreach copy": _microseconds(
                    device, functools.partial(torch._foreach_copy_, pieces, sources), times
                ),
            }


def channels(rank: int, device: str) -> list[dict[str, Any]]:
    """Memory and connection time of each channel; times of even, odd and uneven parts. On every rank."""
    backend = get_backend("cuda" if device == "cuda" else "gloo")
    group, here = backend.group(), backend.device()
    world, numel, times = group.world_size, 2**22 if device == "cuda" else 2**8, 20 if device == "cuda" else 2
    part = torch.ones(numel, device=here)
    whole = torch.ones(numel * world, device=here)
    group.all_reduce(part)
    found: list[dict[str, Any]] = []
    for name in CHANNELS:
        before, began = _free(device), time.perf_counter()
        channel = group.channel(name)
        connected = time.perf_counter() - began
        channel.all_gather_into(whole, part)
        channel.reduce_scatter_into(part, whole)
        backend.synchronize()
        row = {"what": f"channel {name}", "connect ms": connected * 1e3}
        if device == "cuda":
            row["MiB"] = (before - _free(device)) / 2**20
        found.append(row)
    channel = group.channel("gradients")
    quarter = numel // 4
    uneven = [quarter] * (world - 1) + [numel * world - quarter * (world - 1)]
    last_alone = [0] * (world - 1) + [numel * world]
    for dtype in (torch.bfloat16, torch.float32):
        for name, sizes in (
            ("even", [numel] * world), ("even + 1", [numel + 1] * world), ("uneven", uneven), ("one rank", last_alone),
        ):  # fmt: skip
            shard = torch.ones(sizes[rank], device=here, dtype=dtype)
            buffer = torch.ones(sum(sizes), device=here, dtype=dtype)
            gather = _microseconds(
                device, lambda s=shard, b=buffer, n=sizes: channel.all_gather_into(b, s, n), times
            )
            reduce = _microseconds(
                device,
                lambda s=shard, b=buffer, n=sizes: channel.reduce_scatter_into(s, b, n, op=ReduceOp.AVG),
                times,
            )
            found.append(
                {"what": f"{name}, {str(dtype).removeprefix('torch.')}", "all-gather us": gather,
                 "reduce-scatter us": reduce}
            )  # fmt: skip
    return found


def _free(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
