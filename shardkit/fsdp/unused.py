"""Which original parameters of a flat parameter had no gradient, on any rank, since it was last cleared."""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_

import torch


class Unused:
    """See above.

    Attributes:
        originals: for each, whether it had none. Where execution is lazy that is data, and all are taken to have had
            one, as they are before the first backward.
        used: there, [S]: true for elements of this rank's shard that have had one; None if all have.
        is_noted: a backward has said so since the last step.
    """

    def __init__(self, count: int) -> None:
        self.originals = [False] * count
        self.used: torch.Tensor | None = None
        self.is_noted = False

    def clear(self, used: torch.Tensor | None) -> None:
        """The gradient is new: none has had one yet; ``used`` says so for elements, where execution is lazy."""
        self.originals = [True] * len(self.originals)
        self.used = used

    def note(self, had: Sequence[bool], is_new: bool) -> None:
        """These have got a gradient: the first since it was cleared, if it ``is_new``."""
        self.is_noted = True
        if is_new:
            self.originals = list(map(not_, had))
        elif True in self.originals:
            self.originals = [i and not h for i, h in zip(self.originals, had, strict=True)]

    def note_each(self, had: Sequence[bool], are_new: Sequence[bool]) -> None:
        """As :meth:`note`, where each has a gradient of its own: the first since it was cleared, or not."""
        self.is_noted = True
        self.originals = [
            (i or new) and not h for i, h, new in zip(self.originals, had, are_new, strict=True)
        ]

    def note_elements(self, used: torch.Tensor | None, is_new: bool) -> None:
        """The same for elements, [S]; None if all have got one."""
        self.originals = [False] * len(self.originals)
        if is_new:
            self.used = used
        elif self.used is not None:
            self.used = None if used is None else self.used | used
