"""Lists steps and contents of checkpoints, and prints what the commands of ``shardkit ckpt`` have found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...errors import ShardkitError
from ...tracing.tables import counted, in_bytes, plain_table
from ...types import StateDict
from ..format.folders import TEMPORARY, steps_in
from ..format.manifest import read_manifest
from .comparing import Comparison, Verified, short, short_dtype
from .converting import Converted
from .opening import open_checkpoint
from .stored import Checkpoint, StoredTensor, at, dotted


def steps(folder: str) -> list[StateDict]:
    """Returns a row for each step of a folder, or for the checkpoint that the path is."""
    if not os.path.isdir(folder) or not (steps_in(folder) or unfinished(folder)):
        checkpoint = open_checkpoint(folder)
        return [_row(checkpoint.path, checkpoint.kind, dict(checkpoint.facts))]
    rows = unfinished(folder)
    for step in steps_in(folder):
        path = step.path
        facts: StateDict = {"step": step.step}
        problem = None if step.is_complete else "incomplete: it has no shardkit.json"
        if step.is_complete:
            try:
                manifest = read_manifest(path)
                facts = {
                    "step": manifest.step,
                    "world_size": manifest.world_size,
                    "written": manifest.written,
                    "run": manifest.run,
                    "versions": dict(manifest.versions),
                }
                problem = _problem(path, {name: f.bytes for name, f in manifest.files.items()})
                if problem is None and manifest.step != step.step:
                    problem = f"its shardkit.json is of step {manifest.step}"
            except ShardkitError as error:
                problem = str(error)
        rows.append({**_row(path, "shardkit", facts), "problem": problem})
    return rows


def unfinished(folder: str) -> list[StateDict]:
    """Returns a row for each step that is being written, or was when its job was killed."""
    rows = []
    for entry in sorted(os.listdir(folder)):
        match = TEMPORARY.fullmatch(entry)
        if match and match["kind"] == "part":
            what = "being written, or left by a job that was killed; the next save removes it"
            rows.append(
                {
                    **_row(os.path.join(folder, entry), "shardkit", {"step": int(match["step"])}),
                    "problem": what,
                }
            )
    return rows


def _row(path: str, kind: str, facts: StateDict) -> StateDict:
    files = [e.path for e in os.scandir(path) if e.is_file()] if os.path.isdir(path) else [path]
    size = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return {
        "path": path, "kind": kind, "bytes": size, "files": len(files) or 1, "problem": None, **facts,
    }  # fmt: skip


def _problem(folder: str, files: Mapping[str, int]) -> str | None:
    """Says what is wrong with the sizes of files; verify compares the bytes."""
    for name, size in files.items():
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            return f"{name} is missing"
        if os.path.getsize(path) != size:
            return f"{name} has {os.path.getsize(path)} bytes, and {size} were written"
    return None


def contents(checkpoint: Checkpoint) -> StateDict:
    """Lists all tensors, the optimizer's groups, and what else there is."""
    tensors = [_tensor(name, tensor) for name, tensor in in_natural_order(checkpoint.tensors())]
    model = {id(v): None for v in checkpoint.model.values()}
    held = [t for _, t in checkpoint.tensors()]
    of_model = [t for t in held if id(t) in model]
    path = checkpoint.optimizer_path
    hidden = None if path is None else f"{dotted(path)}.param_groups."
    return {
        "path": checkpoint.path,
        "kind": checkpoint.kind,
        **checkpoint.facts,
        "tensors": tensors,
        "bytes": sum(t.nbytes for t in held),
        "model": {
            "key": ".".join(map(str, checkpoint.model_path)),
            "tensors": len(of_model),
            "elements": sum(t.numel for t in of_model),
            "bytes": sum(t.nbytes for t in of_model),
        },
        "param_groups": _groups(checkpoint),
        "values": {
            n: _plain(v) for n, v in checkpoint.values() if hidden is None or not n.startswith(hidden)
        },
        "left_out": checkpoint.left_out,
    }


def in_natural_order(tensors: Iterable[tuple[str, StoredTensor]]) -> list[tuple[str, StoredTensor]]:
    """Sorts by name, layers.2 before layers.10; in the order of what they belong to."""
    named = list(tensors)
    tops = list(dict.fromkeys(name.partition(".")[0] for name, _ in named))

    def key(item: tuple[str, StoredTensor]) -> tuple[int, list[tuple[bool, int, str]]]:
        top, _, rest = item[0].partition(".")
        parts = [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in rest.split(".")]
        return (tops.index(top) if rest else -1), parts

    return sorted(named, key=key)


def _tensor(name: str, tensor: StoredTensor) -> StateDict:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": short_dtype(tensor.dtype),
        "bytes": tensor.nbytes,
        "parts": max(1, len({id(part.where) for part in tensor.parts})),
    }


def _groups(checkpoint: Checkpoint) -> list[StateDict]:
    path = checkpoint.optimizer_path
    if path is None:
        return []
    groups = at(checkpoint.tree, path)["param_groups"]
    return [
        {k: (len(v) if k == "params" else _plain(v)) for k, v in g.items() if k != "param_names"}
        for g in groups
    ]


def _plain(value: object) -> object:
    """Returns it as JSON takes it."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, StoredTensor):
        return value.read().tolist() if value.numel == 1 else f"tensor {list(value.shape)}"
    return short(value)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    if not rows:
        return
    print(f"{title}\n{plain_table(head, rows, right)}" if title else plain_table(head, rows, right))


def print_steps(folder: str, rows: Sequence[StateDict]) -> None:
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
    for result in results:
        for damage in result.damages:
            print(f"{result.path}: {damage}")
        state = f"{len(result.damages)} damaged" if result.damages else "as written"
        size = f"{counted(result.files, 'file')}, {counted(result.items, 'item')}, {in_bytes(result.bytes)}"
        print(f"{result.path}: {size}: {state}")
        for limit in result.limits:
            print(f"  not everything is covered: {limit}")


def print_comparison(a: str, b: str, result: Comparison) -> None:
    table(f"{a} | {b}", ("name", "difference"), [(d.name, d.what) for d in result.differences], ())
    for what in result.not_compared:
        print(f"not compared: {what}")
    print(
        f"{counted(result.tensors, 'tensor')} compared, "
        + (counted(len(result.differences), "difference") if result.differences else "all the same")
    )


def print_converted(source: str, target: str, result: Converted) -> None:
    size = f"{counted(result.tensors, 'tensor')}, {in_bytes(result.bytes)}"
    print(f"{source} ({result.source}) -> {target} ({result.target}): {size}")
    for note in result.notes:
        print(f"  {note}")


def lines_of(results: Sequence[Verified]) -> Iterator[StateDict]:
    for result in results:
        yield {
            "path": result.path,
            "files": result.files,
            "items": result.items,
            "bytes": result.bytes,
            "damages": [{"file": d.file, "name": d.name, "what": d.what} for d in result.damages],
            "limits": result.limits,
        }
