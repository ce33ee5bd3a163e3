"""Draws the pictures of the pages, of real runs on simulated ranks: ``python docs/pictures/draw.py``.

Colours and greys can be read on white and on black; nothing is drawn behind them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.tools.estimate import KINDS, Subject, estimate

FOLDER = Path(__file__).parent
GREY = "#848d97"
VERBS = {"all_gather": "gather", "reduce_scatter": "reduce"}
COLOURS = ("#4e79a7", "#d37a22", "#4f9a48", "#c25053", "#9569a1", "#8a6f5c", "#b39b2d")


def svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="13" role="img"><title>{escape(title)}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, colour: str, *, hollow: bool = False) -> str:
    fill = f'fill="none" stroke="{colour}" stroke-dasharray="4 3"' if hollow else f'fill="{colour}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" {fill}/>'


def words(x: float, y: float, text: str, colour: str = GREY, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'


# ------------------------------------------------------------ one flat parameter
def _shards(rank: int) -> list[float]:
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).reshape(2, 3))
        layer.bias.copy_(torch.tensor([6.0, 7.0]))
    return next(shardkit.FSDP(layer).parameters()).tolist()


def flat_parameter() -> str:
    """The layer of the first notebook: eight numbers on three ranks."""
    shards = shardkit.launch(_shards, 3, backend="simulated")
    cell, left, parts = 52.0, 130.0, []
    parts.append(words(left - 12, 42, "parameters", anchor="end"))
    parts.append(words(left - 12, 112, "end to end", anchor="end"))
    parts.append(words(left - 12, 192, "on its rank", anchor="end"))
    for k, value in enumerate(v for shard in shards for v in shard):
        is_padding, colour = k >= 8, COLOURS[0] if k < 6 else COLOURS[1]
        x = left + cell * k
        if not is_padding:
            parts += [box(x + 2 + 14 * (k >= 6), 20, cell - 4, 36, colour)]
            parts += [words(x + cell / 2 + 14 * (k >= 6), 43, f"{value:g}", "#fff")]
        rank = k // 3
        for y, shift in ((90, 0.0), (170, 18.0 * rank)):
            parts.append(
                box(x + 2 + shift, y, cell - 4, 36, GREY if is_padding else colour, hollow=is_padding)
            )
            parts.append(words(x + cell / 2 + shift, y + 23, f"{value:g}", GREY if is_padding else "#fff"))
    parts.append(words(left + 3 * cell, 14, "weight [2, 3]"))
    parts.append(words(left + 7 * cell + 14, 14, "bias [2]"))
    parts.append(words(left + 8.5 * cell, 82, "padding"))
    for rank in range(3):
        parts.append(words(left + cell * (3 * rank + 1.5) + 18 * rank, 228, f"rank {rank}"))
    return svg(660, 240, parts, "A unit's parameters, end to end, cut into equal shards")


# ------------------------------------------------------------ a step in time
def _step(rank: int, path: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[shardkit.FSDP(nn.Linear(64, 64)) for _ in range(4)])
    model = shardkit.FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with shardkit.trace(path):
        step()


def _events() -> list[tuple[str, str]]:
    """Kind and unit, in the order of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        shardkit.launch(_step, 2, backend="simulated", args=(path,))
        events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") == "shardkit"]
    mine = sorted((e for e in events if e["ph"] == "X" and e["pid"] == 0), key=lambda e: e["ts"])
    return [(e["args"]["kind"], e["args"]["unit"]) for e in mine if e["args"]["unit"] != "root"]


def timeline() -> str:
    """What is computed, and what travels meanwhile; as long as each other, for only the order is known."""
    left, wide, slot, parts = 120.0, 82.0, -1, []
    flying: dict[tuple[str, str], float] = {}
    lanes = {"all_gather": 20.0, "compute": 62.0, "reduce_scatter": 104.0}
    for kind, unit in _events():
        what, _, waits = kind.partition(".")
        colour = COLOURS[int(unit)] if unit.isdigit() else GREY
        if kind in ("forward", "backward", "step"):
            slot += 1
            x = left + wide * (slot + 1)
            parts.append(box(x + 2, lanes["compute"], wide - 4, 30, colour))
            parts.append(
                words(x + wide / 2, lanes["compute"] + 20, f"{kind} {unit}".replace(" AdamW", ""), "#fff")
            )
        elif waits and (what, unit) in flying:
            start, end = flying.pop((what, unit)), left + wide * (slot + 1 + (what == "reduce_scatter"))
            end = max(end, start + wide)
            parts.append(box(start + 2, lanes[what], end - start - 4, 30, colour))
            parts.append(words((start + end) / 2, lanes[what] + 20, f"{VERBS[what]} {unit}", "#fff"))
        elif what in lanes:
            first = what == "all_gather" and slot < 0
            flying[what, unit] = left + wide * (0 if first else slot + 1 + (what == "reduce_scatter"))
    named = {"all_gather": "gathers", "compute": "computes", "reduce_scatter": "reduces"}
    parts += [words(left - 10, y + 20, named[lane], anchor="end") for lane, y in lanes.items()]
    return svg(
        left + wide * (slot + 3),
        150,
        parts,
        "A step of FSDP: units are gathered ahead, gradients leave behind",
    )


# ------------------------------------------------------------ memory over a step
def _language_model() -> Subject:
    width, words_ = 512, 8000

    def model() -> nn.Module:
        blocks = [
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(8)
        ]
        return nn.Sequential(nn.Embedding(words_, width), nn.Sequential(*blocks), nn.Linear(width, words_))

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        tokens = torch.zeros(batch, 65, dtype=torch.long, device="meta")
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def units(model: Any, unit: Any) -> None:
        for name, block in list(model[1].named_children()):
            setattr(model[1], name, unit(block))

    return Subject("language model", model, loss, (torch.optim.AdamW, {"lr": 1e-3}), units)


def memory() -> str:
    """FSDP on 1 and on 8 ranks, on one scale."""
    subject, parts, high, wide = _language_model(), [], 220.0, 330.0
    runs = [estimate(subject, "fsdp", ranks, 2, points=120) for ranks in (1, 8)]
    top = max(sum(kinds.values()) for run in runs for _, kinds in run.course) * 1.05
    for number, run in enumerate(runs):
        left, last = 70 + number * (wide + 50), run.course[-1][0]
        below = [0.0] * len(run.course)
        for kind, colour in zip(KINDS, COLOURS, strict=False):
            above = [b + kinds.get(kind, 0) for b, (_, kinds) in zip(below, run.course, strict=True)]
            xs = [left + wide * at / last for at, _ in run.course]
            edge = [*zip(xs, above, strict=True), *reversed([*zip(xs, below, strict=True)])]
            points = " ".join(f"{x:.0f},{30 + high * (1 - y / top):.1f}" for x, y in edge)
            parts.append(f'<polygon points="{points}" fill="{colour}"/>')
            below = above
        parts.append(
            words(left + wide / 2, 18, f"{run.ranks} rank{'s' * (run.ranks > 1)}: {run.peak / 2**20:.0f} MiB")
        )
        parts.append(words(left + wide / 4, high + 50, "forward"))
        parts.append(words(left + wide * 0.68, high + 50, "backward"))
    for share in (0.0, 0.5, 1.0):
        y = 30 + high * (1 - share / 1.05)
        parts.append(words(62, y + 4, f"{share * top / 1.05 / 2**20:.0f}", anchor="end"))
    parts.append(words(62, high + 50, "MiB", anchor="end"))
    for k, (kind, colour) in enumerate(zip(KINDS, COLOURS, strict=False)):
        x = 70 + 140 * k
        parts += [box(x, high + 66, 14, 14, colour), words(x + 20, high + 78, kind, anchor="start")]
    return svg(800, high + 90, parts, "Memory of a rank over a step, by kind, on one rank and on eight")


if __name__ == "__main__":
    for draw in (flat_parameter, timeline, memory):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw())
