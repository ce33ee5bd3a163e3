"""The report of a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardkit.backends.simulated.rank_threads import Hang, named, ranks_by, said_of
from shardkit.errors import RankFailedError
from shardkit.tracing.tables import counted, in_bytes

from .ranks import RankRecord, Sent

_Number = TypeVar("_Number", int, float)
_LARGEST = 12  # kinds of collectives that are listed


@dataclass(frozen=True)
class Report:
    """See above.

    Attributes:
        steps: after how many steps ranks were to end.
        ranks: what each did.
        hang: where ranks could not go on; None: they all came to their end.
        failure: the first error of a rank; where ranks would hang, an OutOfStepError.
        results: what the function returned, by rank; empty if a rank failed.
        alone: the same program on one rank, if that was asked for.
    """

    name: str
    steps: int | None
    ranks: Sequence[RankRecord]
    hang: Hang | None
    failure: RankFailedError | None
    results: Sequence[object]
    alone: Report | None = None

    @property
    def is_good(self) -> bool:
        """Says whether all ranks came to their end, and none would wait for ever."""
        return self.hang is None and self.failure is None

    def uneven_batches(self) -> list[str]:
        """Lists passes over data that are longer on some ranks than on others, one sentence for each."""
        found = []
        for passes in zip(*(seen.loaders for seen in self.ranks), strict=False):
            lengths = {rank: loader.batches for rank, loader in enumerate(passes)}
            if len(set(lengths.values())) > 1:
                parts = [f"{count} on {named(ranks)}" for count, ranks in ranks_by(lengths).items()]
                found.append(f"batches of the DataLoader at {passes[0].place}: {', '.join(parts)}")
        return found

    def losses(self) -> list[float]:
        """Lists for each step the mean over ranks, and over backwards of a rank, of what ``backward`` was called on."""
        means = []
        for per_rank in zip(*(seen.losses for seen in self.ranks), strict=False):
            values = [value for losses in per_rank for value in losses]
            if values:
                means.append(sum(values) / len(values))
        return means

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def as_data(self) -> dict[str, object]:
        """Returns numbers, lists and text, for programs."""
        return {
            "program": self.name,
            "ranks": len(self.ranks),
            "good": self.is_good,
            "hang": None if self.hang is None else self.hang.what,
            "stands": {} if self.hang is None else {str(r): text for r, text in self.hang.stands.items()},
            "error": None if self.failure is None else self.failure.remote_traceback,
            "uneven_batches": self.uneven_batches(),
            "steps": [seen.steps for seen in self.ranks],
            "losses": self.losses(),
            "losses_of_one_process": None if self.alone is None else self.alone.losses(),
            "peak_bytes": [seen.peak for seen in self.ranks],
            "sent_bytes": [sum(seen.sent.values()) for seen in self.ranks],
            "seconds": [seen.seconds for seen in self.ranks],
            "waited_seconds": [seen.waited for seen in self.ranks],
            "collectives": [
                {"operation": kind.operation, "place": str(kind.place), "calls": calls, "sent_bytes": sent}
                for kind, calls, sent in self._by_kind()
            ],
        }

    def _lines(self) -> Iterator[str]:
        yield f"{self.name} on {counted(len(self.ranks), 'simulated rank')}: " + (
            "every rank came to its end" if self.is_good else "RANKS CAN'T GO ON"
        )
        yield from self._troubles()
        uneven = self.uneven_batches()
        if uneven:
            yield "\nUneven batches: with a step for each batch, ranks with more of them wait for ever."
            yield from (f"  {text}" for text in uneven)
        yield "\n" + " " * 27 + "least      most of all ranks"
        yield _row("steps", [seen.steps for seen in self.ranks], str)
        if any(seen.peak for seen in self.ranks):
            yield _row("bytes in tensors, peak", [seen.peak for seen in self.ranks], in_bytes)
        yield _row("bytes sent", [sum(seen.sent.values()) for seen in self.ranks], in_bytes)
        yield _row("seconds", [seen.seconds for seen in self.ranks], "{:.2f}".format)
        yield _row("  of these waited", [seen.waited for seen in self.ranks], "{:.2f}".format)
        losses = self.losses()
        if losses:
            yield f"loss by step, mean of all ranks: {_some(losses)}"
        yield from self._beside_one_process(losses)
        kinds = self._by_kind()
        if kinds:
            yield "\nCollectives of rank 0, and the bytes that a rank sends for them:"
            for kind, calls, sent in kinds[:_LARGEST]:
                yield f"  {calls:6} x {kind.operation:26} {in_bytes(sent):>10}  {kind.place}"
            if len(kinds) > _LARGEST:
                yield f"  and {len(kinds) - _LARGEST} kinds more"

    def _beside_one_process(self, losses: Sequence[float]) -> Iterator[str]:
        if self.alone is None:
            return
        if self.alone.failure is not None:
            last = self.alone.failure.remote_traceback.rstrip().rpartition("\n")[2]
            yield f"one process could not run it: {last}"
            return
        theirs = self.alone.losses()
        yield f"loss by step, in one process:    {_some(theirs)}"
        pairs = list(zip(losses, theirs, strict=False))
        if pairs:
            apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs]
            yield f"they differ by at most {max(apart):.1e} (step {apart.index(max(apart)) + 1} of {len(pairs)})"

    def _troubles(self) -> Iterator[str]:
        if self.hang is not None:
            yield f"\n{self.hang.what}"
            yield "\nWhere each rank stood:"
            for text, ranks in ranks_by(self.hang.stands).items():
                yield f"  {said_of(ranks, text)}"
        if self.failure is not None and self.failure.remote_type not in ("OutOfStepError", "RankLostError"):
            yield f"\nThe first error, on rank {self.failure.rank}:\n{self.failure.remote_traceback.rstrip()}"

    def _by_kind(self) -> list[tuple[Sent, int, int]]:
        """Lists those of rank 0; those that send most first."""
        first = self.ranks[0]
        kinds = sorted(first.calls, key=lambda kind: -first.sent[kind])
        return [(kind, first.calls[kind], first.sent[kind]) for kind in kinds]


def _row(what: str, values: Sequence[_Number], as_text: Callable[[_Number], str]) -> str:
    least, most = min(values), max(values)
    ranks = [rank for rank, value in enumerate(values) if value == most]
    who = "" if least == most else f"   most on {named(ranks)}"
    return f"{what:22} {as_text(least):>9} {as_text(most):>9}{who}"


def _some(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in losses[:8]) + (", ..." if len(losses) > 8 else "")
