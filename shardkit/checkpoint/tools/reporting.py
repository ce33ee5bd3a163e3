"""For people: tables, and a bar where ``rich`` is installed and this is a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

from ...tables import counted, in_bytes, plain_table
from ...types import StateDict
from .comparing import Comparison
from .converting import Converted
from .stored import StoredTensor
from .verifying import Verified


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    """Prints a table."""
    if not rows:
        return
    print(f"{title}\n{plain_table(head, rows, right)}" if title else plain_table(head, rows, right))


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[StoredTensor], None]]:
    """A bar on the terminal, while something takes its time; nothing where there is none, or no ``rich``."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda tensor: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda tensor: bar.advance(task, tensor.nbytes)


def print_steps(folder: str, rows: Sequence[StateDict]) -> None:
    """``ls``."""
    head = ("step", "kind", "size", "files", "ranks", "written", "")
    lines = [
        (
            str(row.get("step", "")), row["kind"], in_bytes(row["bytes"]), str(row["files"]),
            str(row.get("world_size", "")), str(row.get("written", "")).replace("T", " ").replace("+00:00", " UTC"),
            row["problem"] or "complete" if row["kind"] == "shardkit" else "",
        )
        for row in rows
    ]  # fmt: skip
    table(folder, head, lines, (0, 2, 3, 4))


def print_contents(found: StateDict) -> None:
    """``show``."""
    facts = [f"{found['path']}: {found['kind']}"]
    facts += [
        f"{k.replace('_', ' ')} {found[k]}" for k in ("step", "world_size", "written", "run") if k in found
    ]
    print(", ".join(facts))
    versions = found.get("versions")
    if versions:
        print("written with " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    model = found["model"]
    where = f"in {model['key']!r}, " if model["key"] else ""
    print(
        f"model: {where}{counted(model['tensors'], 'tensor')}, {counted(model['elements'], 'element')}, "
        f"{in_bytes(model['bytes'])}"
    )
    print(f"all: {counted(len(found['tensors']), 'tensor')}, {in_bytes(found['bytes'])}")
    rows = [
        (t["name"], str(t["shape"]), t["dtype"], in_bytes(t["bytes"]), str(t["parts"]))
        for t in found["tensors"]
    ]
    table("", ("tensor", "shape", "dtype", "size", "parts"), rows, (3, 4))
    for k, group in enumerate(found["param_groups"]):
        options = ", ".join(f"{n}={v}" for n, v in group.items() if n != "params")
        print(f"param group {k}: {counted(group.get('params', 0), 'parameter')}, {options}")
    for name, value in found["values"].items():
        print(f"{name}: {value}")
    for what in found["left_out"]:
        print(f"also there, not read: {what}")


def print_verified(results: Sequence[Verified]) -> None:
    """``verify``."""
    for result in results:
        for damage in result.damages:
            print(f"{result.path}: {damage}")
        state = f"{len(result.damages)} damaged" if result.damages else "as written"
        size = f"{counted(result.files, 'file')}, {counted(result.items, 'item')}, {in_bytes(result.bytes)}"
        print(f"{result.path}: {size}: {state}")
        for limit in result.limits:
            print(f"  not everything is covered: {limit}")


def print_comparison(a: str, b: str, result: Comparison) -> None:
    """``diff``."""
    table(f"{a} | {b}", ("name", "difference"), [(d.name, d.what) for d in result.differences], ())
    for what in result.not_compared:
        print(f"not compared: {what}")
    print(
        f"{counted(result.tensors, 'tensor')} compared, "
        + (counted(len(result.differences), "difference") if result.differences else "all the same")
    )


def print_converted(source: str, target: str, result: Converted) -> None:
    """``convert``."""
    size = f"{counted(result.tensors, 'tensor')}, {in_bytes(result.bytes)}"
    print(f"{source} ({result.source}) -> {target} ({result.target}): {size}")
    for note in result.notes:
        print(f"  {note}")


def lines_of(results: Sequence[Verified]) -> Iterator[StateDict]:
    """``verify --json``."""
    for result in results:
        yield {
            "path": result.path, "files": result.files, "items": result.items, "bytes": result.bytes,
            "damages": [{"file": d.file, "name": d.name, "what": d.what} for d in result.damages],
            "limits": result.limits,
        }  # fmt: skip
