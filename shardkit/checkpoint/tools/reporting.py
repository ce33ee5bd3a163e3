"""Lists steps and contents of checkpoints; and, as lines of text, what the commands of ``shardkit ckpt`` have found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...errors import ShardkitError
from ...tracing.tables import counted, in_bytes, plain_table
from ...types import StateDict
from ..format.folders import TEMPORARY, steps_in
from ..format.manifest import read_manifest
from ..format.metadata import dotted
from .comparing import Comparison, Verified, open_checkpoint, short
from .converting import Converted
from .stored import Checkpoint, StoredTensor, at


def steps(folder: str) -> list[StateDict]:
    """Returns a row for each step of a folder, or for the checkpoint that the path is."""
    if not os.path.isdir(folder) or not (steps_in(folder) or _unfinished(folder)):
        checkpoint = open_checkpoint(folder)
        return [_row(checkpoint.path, checkpoint.kind, dict(checkpoint.facts))]
    rows = _unfinished(folder)
    for number, path, is_complete in steps_in(folder):
        facts: StateDict = {"step": number}
        problem = None if is_complete else "incomplete: it has no shardkit.json"
        if is_complete:
            try:
                manifest = read_manifest(path)
                facts = manifest.facts
                problem = _problem(path, {name: f.bytes for name, f in manifest.files.items()})
                if problem is None and manifest.step != number:
                    problem = f"its shardkit.json is of step {manifest.step}"
            except ShardkitError as error:
                problem = str(error)
        rows.append(_row(path, "shardkit", {**facts, "problem": problem}))
    return rows


def _unfinished(folder: str) -> list[StateDict]:
    """Returns a row for each step that is being written, or was when its job was killed."""
    rows = []
    for entry in sorted(os.listdir(folder)):
        match = TEMPORARY.fullmatch(entry)
        if match and match["kind"] == "part":
            what = "being written, or left by a job that was killed; the next save removes it"
            facts = {"step": int(match["step"]), "problem": what}
            rows.append(_row(os.path.join(folder, entry), "shardkit", facts))
    return rows


def _row(path: str, kind: str, facts: StateDict) -> StateDict:
    files = [e.path for e in os.scandir(path) if e.is_file()] if os.path.isdir(path) else [path]
    size = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    own = {"path": path, "kind": kind, "bytes": size, "files": len(files) or 1, "problem": None}
    return {**own, **facts}


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
    tensors = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.nbytes,
            "parts": max(1, len({id(part.where) for part in tensor.parts})),
        }
        for name, tensor in in_natural_order(checkpoint.tensors())
    ]
    model = {id(v): None for v in checkpoint.model.values()}
    held = [t for _, t in checkpoint.tensors()]
    of_model = [t for t in held if id(t) in model]
    path = checkpoint.optimizer_path
    groups = [] if path is None else at(checkpoint.tree, path)["param_groups"]
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
        "param_groups": [
            {k: (len(v) if k == "params" else _plain(v)) for k, v in group.items() if k != "param_names"}
            for group in groups
        ],
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


def _plain(value: object) -> object:
    """Returns it as JSON takes it."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if isinstance(value, StoredTensor):
        return value.read().tolist() if value.numel == 1 else f"tensor {list(value.shape)}"
    return short(value)


def _table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]
) -> Iterator[str]:
    if rows:
        yield from ([title] if title else [])
        yield plain_table(head, rows, right)


def steps_as_text(folder: str, rows: Sequence[StateDict]) -> Iterator[str]:
    head = ("step", "kind", "size", "files", "ranks", "written", "")
    lines = []
    for row in rows:
        step, ranks, when = (str(row.get(name, "")) for name in ("step", "world_size", "written"))
        when = when.replace("T", " ").replace("+00:00", " UTC")
        state = row["problem"] or "complete" if row["kind"] == "shardkit" else ""
        lines.append((step, row["kind"], in_bytes(row["bytes"]), str(row["files"]), ranks, when, state))
    return _table(folder, head, lines, (0, 2, 3, 4))


def contents_as_text(found: StateDict) -> Iterator[str]:
    facts = [f"{found['path']}: {found['kind']}"]
    facts += [
        f"{k.replace('_', ' ')} {found[k]}" for k in ("step", "world_size", "written", "run") if k in found
    ]
    yield ", ".join(facts)
    versions = found.get("versions")
    if versions:
        yield "written with " + ", ".join(f"{k} {v}" for k, v in versions.items())
    model = found["model"]
    where = f"in {model['key']!r}, " if model["key"] else ""
    counts = f"{counted(model['tensors'], 'tensor')}, {counted(model['elements'], 'element')}"
    yield f"model: {where}{counts}, {in_bytes(model['bytes'])}"
    yield f"all: {counted(len(found['tensors']), 'tensor')}, {in_bytes(found['bytes'])}"
    rows = []
    for t in found["tensors"]:
        rows.append((t["name"], str(t["shape"]), t["dtype"], in_bytes(t["bytes"]), str(t["parts"])))
    yield from _table("", ("tensor", "shape", "dtype", "size", "parts"), rows, (3, 4))
    for k, group in enumerate(found["param_groups"]):
        options = ", ".join(f"{n}={v}" for n, v in group.items() if n != "params")
        yield f"param group {k}: {counted(group.get('params', 0), 'parameter')}, {options}"
    yield from (f"{name}: {value}" for name, value in found["values"].items())
    yield from (f"also there, not read: {what}" for what in found["left_out"])


def verified_as_text(results: Sequence[Verified]) -> Iterator[str]:
    for result in results:
        yield from (f"{result.path}: {damage}" for damage in result.damages)
        state = f"{len(result.damages)} damaged" if result.damages else "as written"
        size = f"{counted(result.files, 'file')}, {counted(result.items, 'item')}, {in_bytes(result.bytes)}"
        yield f"{result.path}: {size}: {state}"
        yield from (f"  not everything is covered: {limit}" for limit in result.limits)


def comparison_as_text(a: str, b: str, result: Comparison) -> Iterator[str]:
    differences = [(d.name, d.what) for d in result.differences]
    yield from _table(f"{a} | {b}", ("name", "difference"), differences, ())
    yield from (f"not compared: {what}" for what in result.not_compared)
    found = counted(len(differences), "difference") if differences else "all the same"
    yield f"{counted(result.tensors, 'tensor')} compared, {found}"


def converted_as_text(source: str, target: str, result: Converted) -> Iterator[str]:
    size = f"{counted(result.tensors, 'tensor')}, {in_bytes(result.bytes)}"
    yield f"{source} ({result.source}) -> {target} ({result.target}): {size}"
    yield from (f"  {note}" for note in result.notes)
