"""Pictures of estimates: a step's memory by kind, and what is sent for how many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigurationError
from .memory import KINDS
from .stepping import Estimate

_GIB = 2**30


def plot(estimates: Sequence[Estimate], path: str | Path, title: str = "") -> None:
    """Writes a picture (SVG, PNG or PDF, by the file's name).

    On the left is the first estimate's memory over a step (it has to have its course), on the right what a rank sends
    in a step for each strategy, beside DDP's two and FSDP2's three parts of the parameters in fp32.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(13, 5), layout="constrained")
    memory, wire = figure.subplots(1, 2)
    first = estimates[0]
    steps = [at for at, _ in first.course]
    memory.stackplot(steps, [[kinds[k] / _GIB for _, kinds in first.course] for k in KINDS], labels=KINDS)
    memory.set(
        title=f"{first.strategy}, {first.ranks} ranks, batch {first.batch}", xlabel="operations of a step",
        ylabel="GiB on the fullest rank", ylim=(0, None),
    )  # fmt: skip
    memory.legend(loc="upper left")
    for strategy in dict.fromkeys(e.strategy for e in estimates):
        points = sorted(
            (e.ranks, e.sent / _GIB) for e in estimates if e.strategy == strategy and e.batch == first.batch
        )
        wire.plot(*zip(*points, strict=True), marker="o", label=strategy)
    ranks = sorted({e.ranks for e in estimates})
    for name, parts in (("DDP", 2), ("FSDP2", 3)):
        sent = [parts * 4 * first.parameters * (w - 1) / w / _GIB for w in ranks]
        wire.plot(ranks, sent, linestyle="--", color="grey", label=f"{name} in fp32")
    wire.set(
        title="sent in a step", xlabel="ranks", ylabel="GiB from each rank", xscale="log", ylim=(0, None)
    )
    wire.legend()
    figure.suptitle(title)
    figure.savefig(path)
