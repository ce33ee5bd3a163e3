"""What depends on what in a program of XLA, from its text."""

from __future__ import annotations

import itertools
import re
from functools import cached_property

_LINE = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (?:\([^)]*\)|\S+) ([\w-]+)\((.*?)\)(?:, (.*))?$", re.MULTILINE)
_COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
_PASSED_ON = {"tuple", "opt-barrier"}  # an element depends on its own input alone


class Program:
    """The entry computation of a program before XLA's optimizations.

    Order that only an optimization barrier gives does not count: XLA removes those before it schedules.
    """

    def __init__(self, text: str) -> None:
        entry = re.sub(r"/\*.*?\*/", "", text[text.index("\nENTRY ") :])
        self._operations: dict[str, tuple[str, list[str], str]] = {
            name: (operation, re.findall(r"%([\w.-]+)", operands), attributes or "")
            for name, operation, operands, attributes in _LINE.findall(entry)
        }

    def count(self, operation: str) -> int:
        """Operations of a kind."""
        return sum(kind == operation for kind, *_ in self._operations.values())

    @cached_property
    def collectives(self) -> list[str]:
        """Names of those whose results are used or sent out."""
        return [name for name, (operation, *_) in self._operations.items() if operation in _COLLECTIVES]

    @cached_property
    def _before(self) -> dict[str, frozenset[str]]:
        """All on which each operation depends; operands stand above."""
        found: dict[str, frozenset[str]] = {}
        for name, (operation, _, _) in self._operations.items():
            if operation not in _PASSED_ON:
                direct = self._operands(name)
                found[name] = frozenset(direct).union(*(found[operand] for operand in direct))
        return found

    def _operands(self, name: str) -> list[str]:
        operation, operands, attributes = self._operations[name]
        if operation != "get-tuple-element":
            return operands
        source, index = operands[0], int(attributes.partition("index=")[2].partition(",")[0])
        while self._operations[source][0] == "opt-barrier":
            source = self._operations[source][1][0]
        return [self._operations[source][1][index] if self._operations[source][0] == "tuple" else source]

    def unordered(self) -> list[tuple[str, str]]:
        """Pairs of collectives of which neither depends on the other."""
        before = self._before
        pairs = itertools.combinations(self.collectives, 2)
        return [(a, b) for a, b in pairs if a not in before[b] and b not in before[a]]

    def waits(self, costly_operation: str) -> tuple[int, int]:
        """Pairs of a collective and an operation of a kind: where the first has to wait, and where the second."""
        costly = {name for name, (operation, *_) in self._operations.items() if operation == costly_operation}
        collectives = set(self.collectives)
        return (
            sum(len(self._before[name] & costly) for name in collectives),
            sum(len(self._before[name] & collectives) for name in costly),
        )
