"""Trains in one way and measures; runs on every rank."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import traceback
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from shardkit import step_in_backward
from shardkit.backend import get_backend
from tests.gpu import cases
from tests.gpu.exposed import of_profile

WARM, STEPS, PROFILED = 3, 8, 2
_SYNCHRONIZES = "synchronizing CUDA operation"


class Run:
    """A model in training."""

    def __init__(self, rank: int, way: str, size: cases.Size, depth: int, variant: cases.Variant) -> None:
        self.rank, self.size = rank, size
        self.device = get_backend("cuda" if torch.cuda.is_available() else "gloo").device()
        self.is_early = way == "masters_early"
        self.bare_mixed = variant.mixed and way == cases.BARE
        model = cases.build(size, depth, variant, self.device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trainer = cases.train(way, model, variant)
        self.batches = [cases.batch(size, n, rank, self.device) for n in range(2)]
        self.count = 0

    def step(self) -> torch.Tensor:
        tokens = self.batches[self.count % len(self.batches)]
        self.count += 1
        loss = cases.loss_of(self.trainer.model, tokens, self.bare_mixed)
        with step_in_backward(self.trainer.optimizer) if self.is_early else nullcontext():
            loss.backward()
        if not self.is_early:
            self.trainer.optimizer.step()
            self.trainer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _timed(run: Run, steps: int) -> tuple[float, float]:
    """Seconds of a step (median), and seconds in which the host issues one."""
    if run.device.type != "cuda":
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            run.step()
            times.append(time.perf_counter() - began)
        return statistics.median(times), statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    began = time.perf_counter()
    issued = []
    for mark in marks[1:]:
        run.step()
        mark.record()
        issued.append(time.perf_counter() - began)
        began = time.perf_counter()
    run.wait()
    taken = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return statistics.median(taken), min(issued)  # the least: with a full queue the host waits


def _host_syncs(run: Run) -> int | None:
    """Host synchronizations of one step, as torch counts them; None where it can't."""
    if run.device.type != "cuda":
        return None
    run.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(_SYNCHRONIZES in str(w.message) for w in caught)


def _communication(run: Run) -> dict[str, float]:
    if run.device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            run.step()
        run.wait()
    return of_profile(profiler, PROFILED)._asdict()


def measure(
    rank: int, way: str, size_name: str, depth: int, variant_name: str, steps: int = STEPS
) -> dict[str, Any]:
    """One row of the table; an error is a row too."""
    row: dict[str, Any] = {"way": way, "size": size_name, "variant": variant_name, "depth": depth}
    run = None
    try:
        on_device = torch.cuda.is_available()
        if on_device:
            torch.cuda.empty_cache()
        run = Run(rank, way, cases.SIZES[size_name], depth, cases.VARIANTS[variant_name])
        losses = [run.step() for _ in range(WARM)]
        run.wait()
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        row["step"], row["host"] = _timed(run, steps)
        if on_device:
            row["peak"] = torch.cuda.max_memory_allocated()
        row["syncs"] = _host_syncs(run)
        row |= _communication(run)
        row |= {"parameters": run.parameters, "losses": [float(v) for v in losses]}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        row["trace"] = traceback.format_exc()[-2000:]
    del run
    gc.collect()
    return row
