"""Tables and numbers for people to read."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(count: float) -> str:
    """Returns a number of bytes with three digits."""
    unit = 0
    while abs(count) >= 1000 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 100 else f"{count:.3g} {_UNITS[unit]}"


def counted(count: int, what: str) -> str:
    """Names how many there are, as "1 rank" and "3 ranks"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def in_time(us: float) -> str:
    """Returns a number of microseconds with three digits."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.0f} us"


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Lays out columns of characters; columns without an entry are left out.

    Args:
        right: numbers of the columns that end at one line.
    """
    shown = [k for k in range(len(head)) if any(row[k] for row in rows)]
    widths = {k: max(len(line[k]) for line in [head, *rows]) for k in shown}
    lines = []
    for line in [head, *rows]:
        cells = [line[k].rjust(widths[k]) if k in right else line[k].ljust(widths[k]) for k in shown]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
