"""Bars as SVG, by hand: nothing has to be installed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_ROW, _LABEL, _BAR, _VALUE = 22, 230, 420, 90
_COLOURS = ("#3465a4", "#73a946", "#c4702b", "#8c5aa0", "#5f6b6d")


def bars(title: str, unit: str, groups: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """One bar a (label, value), in groups with a heading each; all on one scale."""
    most = max((v for rows in groups.values() for _, v in rows), default=0.0) or 1.0
    lines: list[str] = []
    y = 40
    for number, (heading, rows) in enumerate(groups.items()):
        lines.append(f'<text x="8" y="{y + 15}" font-weight="bold">{escape(heading)}</text>')
        y += _ROW
        for label, value in rows:
            width = _BAR * value / most
            colour = _COLOURS[number % len(_COLOURS)]
            lines += [
                f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>',
                f'<rect x="{_LABEL}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}"/>',
                f'<text x="{_LABEL + width + 6:.1f}" y="{y + 15}">{value:.4g}</text>',
            ]
            y += _ROW
        y += 8
    width = _LABEL + _BAR + _VALUE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 8}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{y + 8}" fill="white"/>',
            f'<text x="8" y="22" font-size="15">{escape(title)} ({escape(unit)})</text>',
            *lines,
            "</svg>\n",
        ]
    )
