"""Which original parameters of a flat parameter had no gradient, on any rank, since it was last cleared."""

from __future__ import annotations

from collections.abc import Sequence
from operator import not_

import torch


class Unused:
    """See above.

    Attributes:
        members: for each, whether it had none. Where execution is lazy that is data, and all are taken to have had one.
        used: there, [S]: true for elements of this rank's shard that have had one; None if all have.
    """

    def __init__(self, count: int) -> None:
        self.members = [True] * count
        self.used: torch.Tensor | None = None

    @property
    def are_any(self) -> bool:
        """Whether some had no gradient, or may have had none."""
        return self.used is not None or True in self.members

    def clear(self, used: torch.Tensor | None) -> None:
        """The gradient is new: none has had one yet; ``used`` says so for elements, where execution is lazy."""
        self.members = [True] * len(self.members)
        self.used = used

    def note(self, had: Sequence[bool], is_new: bool) -> None:
        """These have got a gradient: the first since it was cleared, if it ``is_new``."""
        if is_new:
            self.members = list(map(not_, had))
        elif True in self.members:
            self.members = [i and not h for i, h in zip(self.members, had, strict=True)]

    def note_elements(self, used: torch.Tensor | None, is_new: bool) -> None:
        """The same for elements, [S]; None if all have got one."""
        self.members = [False] * len(self.members)
        if is_new:
            self.used = used
        elif self.used is not None:
            self.used = None if used is None else self.used | used
