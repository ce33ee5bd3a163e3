"""GPU.md: device, versions, tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.cases import BARE, SIZES, WAYS

Row = dict[str, Any]
OURS = ("fsdp", "fully_shard")
RIVAL = "torch_fsdp2"
_GIB, _NOTHING = 2**30, "-"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first column is text, the others are numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"
    )


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return _NOTHING if value is None else f"{value * scale:.{digits}f}"


def _rows(results: Sequence[Row], kind: str) -> list[Row]:
    return [row for result in results if result["kind"] == kind for row in result["rows"]]


def _environment(results: Sequence[Row]) -> str:
    found = _rows(results, "environment")
    return table(["", ""], [[k, str(v)] for row in found for k, v in row.items()])


def _phases(results: Sequence[Row], skipped: Sequence[str]) -> str:
    rows = []
    for result in results:
        said = [row["summary"] for row in result["rows"] if "summary" in row]
        rows.append([result["name"], result["ended"], f"{result['seconds']:.0f}", "; ".join(said)])
    text = table(["phase", "ended", "s", "tests"], rows)
    failed = [row["failed"] for row in _rows(results, "tests") if "failed" in row]
    text += "".join(f"\n- `{line}`" for line in failed)
    return text + "".join(f"\n- skipped: {line}" for line in skipped) + "\n"


def _by_case(results: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _rows(results, "bench"):
        found.setdefault((row["size"], row["variant"]), []).append(row)
    order = list(SIZES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0])))


def _of(rows: Sequence[Row], way: str) -> Row:
    return next((r for r in rows if r["way"] == way), {})


def _bench(case: tuple[str, str], rows: Sequence[Row]) -> str:
    (size, variant), bare = case, _of(rows, BARE)
    lines, problems = [], []
    for row in rows:
        if "error" in row:
            problems.append(f"\n- {WAYS[row['way']]}: `{row['error']}`")
        step, plain = row.get("step"), bare.get("step")
        over = None if step is None or not plain else step / plain - 1
        syncs = row.get("syncs")
        lines.append(
            [
                WAYS[row["way"]], _number(step, 1e3, 2), _NOTHING if over is None else f"{over:+.1%}",
                _number(row.get("host"), 1e3, 2), _number(row.get("whole"), 1e3, 2),
                _number(row.get("exposed"), 1e3, 2),
                _number(row.get("peak"), 1 / _GIB, 2), _NOTHING if syncs is None else str(syncs),
                _number(row["losses"][-1], 1, 4) if row.get("losses") else _NOTHING,
            ]
        )  # fmt: skip
    first, shape = rows[0], SIZES[size]
    parameters = next((r["parameters"] for r in rows if "parameters" in r), 0)
    head = (
        f"### GPT {size}, {variant}\n\n{first['depth']} of {shape.depth} layers, {parameters / 1e6:.0f} M parameters, "
        f"{first.get('world', 1)} rank(s), {shape.batch} x {shape.tokens} tokens a rank.\n\n"
    )
    columns = [
        "",
        "step ms",
        "over plain",
        "host ms",
        "comm. ms",
        "exposed ms",
        "peak GiB",
        "host syncs",
        "loss",
    ]
    return head + table(columns, lines) + "".join(problems) + "\n"


def _goals(cases: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    """What is aimed at, with what was seen."""
    rows: list[list[str]] = []

    def goal(what: str, seen: Callable[[Row, Row, Row], tuple[bool, str] | None]) -> None:
        for (size, variant), found in cases.items():
            for way in OURS:
                own, bare, rival = _of(found, way), _of(found, BARE), _of(found, RIVAL)
                judged = seen(own, bare, rival) if "step" in own else None
                if judged is not None:
                    reached, text = judged
                    rows.append([what, f"{size} {variant}, {way}", text, "yes" if reached else "**no**"])

    def overhead(own: Row, bare: Row, rival: Row) -> tuple[bool, str] | None:
        if own["size"] != "1.3B" or own.get("world") != 1 or own["variant"] == "mixed" or "step" not in bare:
            return None
        over = own["step"] / bare["step"] - 1
        return over < 0.02, f"{over:+.2%}"

    def syncs(own: Row, bare: Row, rival: Row) -> tuple[bool, str] | None:
        return None if own.get("syncs") is None else (own["syncs"] == 0, str(own["syncs"]))

    def peak(own: Row, bare: Row, rival: Row) -> tuple[bool, str] | None:
        if "peak" not in own or "peak" not in rival:
            return None
        return own["peak"] <= rival["peak"], f"{own['peak'] / _GIB:.2f} and {rival['peak'] / _GIB:.2f} GiB"

    def exposed(own: Row, bare: Row, rival: Row) -> tuple[bool, str] | None:
        if "exposed" not in own or "exposed" not in rival or own.get("world", 1) == 1:
            return None
        return own["exposed"] <= rival[
            "exposed"
        ], f"{own['exposed'] * 1e3:.2f} and {rival['exposed'] * 1e3:.2f} ms"

    goal("a step at world size 1 takes less than 2 % more than the plain module's", overhead)
    goal("no host synchronization in a step", syncs)
    goal("peak memory is at most FSDP2's", peak)
    goal("exposed communication is at most FSDP2's", exposed)
    return table(["goal", "case", "seen", "reached"], rows)


def _alignment(results: Sequence[Row]) -> str:
    names = ("linear", "input gradient", "foreach copy")
    rows = [
        [f"{r['dtype']}, {r['offset']} bytes", *(_number(r[n]) for n in names)]
        for r in _rows(results, "alignment")
    ]
    return table(["begins at", *(f"{n} us" for n in names)], rows)


def _channels(results: Sequence[Row]) -> str:
    names = ("connect ms", "MiB", "all-gather us", "reduce-scatter us")
    rows = [[r["what"], *(_number(r.get(n)) for n in names)] for r in _rows(results, "channels")]
    return table(["", *names], rows)


def write(folder: Path, device: str, results: Sequence[Row], skipped: Sequence[str]) -> Path:
    """The report."""
    cases = _by_case(results)
    parts = [
        "# On GPUs\n",
        f"Written by `make gpu` on {time.strftime('%Y-%m-%d')}; nobody has edited it.\n",
    ]
    if device == "cpu":
        parts.append("**A trial of the program on a CPU: the numbers say nothing about GPUs.**\n")
    parts += [
        "## Device and versions\n", _environment(results),
        "## What ran\n", _phases(results, skipped),
        "## Goals\n", _goals(cases),
        "## Training\n",
        "bf16 throughout; *mixed*: parameters in fp32, computed with in bf16 (the plain module: autocast). *host* is "
        "the time in which a step is issued, *exposed* the communication during which nothing is computed, *both* "
        "checkpointed and compiled. Times are medians.\n",
        *(_bench(case, rows) for case, rows in cases.items()),
        "## Addresses\n", _alignment(results),
        "## Communicators and parts\n", _channels(results),
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "GPU.md"
    path.write_text("\n".join(parts))
    return path
