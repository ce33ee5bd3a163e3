"""Finds what names fairscale in files that are not Python: ``_target_: fairscale.nn.X`` and requirements."""

from __future__ import annotations

import re

from .rewriting import Note, Rewritten
from .served import objection

SUFFIXES = frozenset({".cfg", ".ini", ".json", ".toml", ".txt", ".yaml", ".yml"})
_NAMED = re.compile(r"(?<![\w./-])fairscale((?:[.:][A-Za-z_]\w*)*)(?![\w/-])")


def rewrite(source: str, *, strings: bool = False) -> Rewritten:
    """As :func:`.rewriting.rewrite`; with ``strings``, paths of what shardkit has are rewritten, else reported."""
    notes: list[Note] = []

    def one(match: re.Match[str]) -> str:
        said = objection(match[0].replace(":", "."))
        if strings and match[1] and said is None:
            return f"shardkit{match[1]}"
        line = source.count("\n", 0, match.start()) + 1
        notes.append(Note(line, f"{match[0]!r} names fairscale" + (f"; {said}" if said else "")))
        return match[0]

    return Rewritten(_NAMED.sub(one, source), tuple(notes))
