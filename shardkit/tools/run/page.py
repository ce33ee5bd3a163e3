"""The page about a failure: its cause, where the others stood, what there is to go on from, and how."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .causes import Failure, tail

_WIDTH = 100
_OTHERS = 16  # ranks of which a line is shown


@dataclass
class Page:
    """What is known about a failure.

    Attributes:
        headline: what happened, in a line.
        cause: the rank that failed first, if one did.
        others: a sentence about each other rank.
        checkpoint: the last complete one.
        next_step: what happens now, or the command that resumes.
        note: further lines.
    """

    headline: str
    run: str
    attempt: int
    cause: Failure | None
    others: dict[int, str]
    checkpoint: Path | None
    next_step: str
    note: str = ""

    def text(self) -> str:
        """At most some 70 lines."""
        where = f"run {self.run}, attempt {self.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
        lines = ["=" * _WIDTH, self.headline, where]
        if self.cause is not None:
            steps = self.cause.steps
            lines[2] += (
                f", after optimizer step {steps} of this attempt" if steps else ", before the first step"
            )
            shown = self.cause.trace
            lines += ["", shown] if shown else []
        lines += ["", self.note] if self.note else []
        if self.others:
            lines += ["", "The others:"]
            lines += [f"  rank {rank} {text}" for rank, text in sorted(self.others.items())[:_OTHERS]]
            if len(self.others) > _OTHERS:
                lines.append(f"  ... and {len(self.others) - _OTHERS} more")
        saved = "none" if self.checkpoint is None else str(self.checkpoint)
        lines += ["", f"Last complete checkpoint: {saved}", self.next_step]
        if self.cause is not None:
            lines.append(f"Its output: {self.cause.files}.out, {self.cause.files}.err")
        return "\n".join([*lines, "=" * _WIDTH, ""])


def where_it_stood(files: Path) -> str:
    """What a rank's thread for questions has written, or what faulthandler has; "" if neither."""
    try:
        text = files.with_name(files.name + ".where").read_text().strip()
    except OSError:
        text = ""
    if text:
        return text
    for line in tail(files.with_name(files.name + ".stacks"), 60):
        name = line.strip()
        if name.startswith('File "') and "/torch/" not in name and "/shardkit/" not in name:
            return f"stood at {name}"
    return ""
