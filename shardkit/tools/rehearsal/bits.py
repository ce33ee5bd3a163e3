"""Runs a program on several numbers of ranks, and finds the first bit in which the trainings differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from shardkit.errors import ConfigurationError
from shardkit.optimizers.shards import changed_by_steps, listing_of
from shardkit.torch_seams.dtensors import local_of
from shardkit.torch_seams.tensors import as_plain
from shardkit.types import Tree

from ..verify import EXACT, Moment, Tensors, Trace, first_parting
from . import Report, rehearse


class RankPart(NamedTuple):
    """Values of one parameter that a rank has after a step: from ``start`` on, of ``numel`` in all."""

    start: int
    numel: int
    values: torch.Tensor


Parts = dict[str, RankPart]


@dataclass(frozen=True)
class BitsReport:
    """Compares what runs on several numbers of ranks have left.

    Attributes:
        reports: of each number of ranks.
        partings: where each leaves the first one, in words; none where all bits are equal.
    """

    reports: dict[int, Report]
    partings: list[str]

    @property
    def is_good(self) -> bool:
        """Says whether all ranks came to their end, with the same bits."""
        return not self.partings and self._steps() > 0 and all(r.is_good for r in self.reports.values())

    def _steps(self) -> int:
        return min(report.ranks[0].steps for report in self.reports.values())

    def __str__(self) -> str:
        broken = [str(report) for report in self.reports.values() if not report.is_good]
        sizes, steps = ", ".join(map(str, self.reports)), self._steps()
        same = f"the same bits on {sizes} ranks: losses and parameters of {steps} steps"
        if not steps:
            same = "no optimizer has made a step, so that nothing was compared"
        return "\n".join([*broken, *(self.partings or ([] if broken else [same]))])


def rehearse_bits(
    target: str | os.PathLike[str] | Callable[[int], object], ranks: Sequence[int], **options: Tree
) -> BitsReport:
    """Rehearses an unchanged script on each number of ranks, and compares losses and parameters after each step.

    Micro-batches are numbered as in docs/SAME_BITS.md. Parameters of all steps of two runs are kept in memory.

    Args:
        options: as of :func:`rehearse`: steps, arguments, is_module, timeout, cpu.
    """
    reports: dict[int, Report] = {}
    partings: list[str] = []
    first: Trace = []
    for size in ranks:
        taken: list[list[Parts]] = [[] for _ in range(size)]

        def take(rank: int, optimizer: Optimizer, taken: list[list[Parts]] = taken) -> None:
            taken[rank].append(parts_of(optimizer))

        report = reports[size] = rehearse(target, size, show=(), memory=False, after_step=take, **options)
        steps = enumerate(zip(*taken, strict=False))
        whole = [Moment(_losses(report, k), parameters=_joined(parts)) for k, parts in steps]
        if size == ranks[0]:
            first = whole
        elif report.is_good and reports[ranks[0]].is_good:
            found = first_parting(whole, first, EXACT)
            if found is not None:
                partings.append(f"{size} ranks and {ranks[0]} part at {found}: {found.detail}")
    return BitsReport(reports, partings)


def parts_of(optimizer: Optimizer) -> Parts:
    """Copies what this rank has of the parameters that an optimizer steps over."""
    found: Parts = {}
    for group in optimizer.param_groups:
        numbered = [f"parameter {len(found) + k}" for k in range(len(group["params"]))]
        for name, listed in zip(group.get("param_names") or numbered, group["params"], strict=True):
            param = changed_by_steps(listed)
            listing = listing_of(param)
            with as_plain(), torch.no_grad():
                values = local_of(param).detach().reshape(-1).clone()
            if listing is None:
                found[name] = RankPart(0, values.numel(), values)
                continue
            for item, start, rank, offset, numel, runs in listing.layout.pieces():
                if rank == listing.group.rank:
                    if runs > 1:
                        raise ConfigurationError(
                            f"bits of {name!r}, which is not cut between its rows, can't be told"
                        )
                    path = (listing.flat.path_of(listing.first + item), listing.names[item])
                    part = RankPart(start, listing.layout.numels[item], values[offset : offset + numel])
                    found[".".join(filter(None, path))] = part
    return found


def _joined(step: Sequence[Parts]) -> Tensors:
    found: Tensors = {}
    for parts in step:
        for name, (start, numel, values) in parts.items():
            if name not in found:
                found[name] = values.new_zeros(numel)
            found[name][start : start + len(values)] = values
    return found


def _losses(report: Report, step: int) -> list[float]:
    """Lists all ranks' of a step, by the number of the micro-batch."""
    each = [seen.losses[step] for seen in report.ranks]
    most = max(map(len, each))
    return [losses[k] for k in range(most) for losses in each if k < len(losses)]
