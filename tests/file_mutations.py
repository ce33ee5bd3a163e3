"""Damages and forges files of ``torch.save`` at random, and reads them: no crash, no call, no memory but the file's.

    python -m tests.file_mutations --count 10000

Every fifth is a table of contents of a distributed checkpoint, for which memory is counted to the byte.

Each batch runs in a process of its own, so that a crash is seen; ``make fuzz`` begins with 10,000 of them.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import tempfile
import traceback
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.checkpoint.format.metadata import read_metadata

ROOT = Path(__file__).parents[1]
BATCH = 1250
# What a file might call: torch's own functions, with which torch.load reads memory that nobody has written, and others.
NAMES = (
    "torch FloatTensor", "torch Tensor", "torch FloatStorage", "torch.storage UntypedStorage", "torch Size",
    "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_qtensor",
    "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_meta_tensor_no_storage", "torch float64",
    "torch._utils _rebuild_wrapper_subclass", "torch._utils _rebuild_device_tensor_from_cpu_tensor",
    "torch._tensor _rebuild_from_type_v2", "torch.nn.parameter Parameter", "numpy ndarray", "numpy dtype",
    "numpy.core.multiarray _reconstruct", "numpy._core.multiarray scalar", "collections OrderedDict", "_codecs encode",
    "collections Counter", "builtins set", "__builtin__ bytearray", "__builtin__ eval", "builtins getattr", "os system",
    "tests.file_mutations called", "torch.distributed.checkpoint.metadata Metadata", "pathlib PosixPath",
    "torch.distributed.checkpoint.metadata MetadataIndex", "torch.distributed.checkpoint.filesystem _StorageInfo",
)  # fmt: skip
# glibc fills what is allocated with the complement of MALLOC_PERTURB_, so that memory nobody has written shows.
UNWRITTEN = bytes([165 ^ 0xFF]) * 8


def called(*_: Any) -> None:
    """What no file may reach."""
    os._exit(99)


def originals(folder: Path) -> list[bytes]:
    """Files of all kinds of contents."""
    import numpy as np

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    shared = torch.arange(12.0)
    state = OrderedDict(model.state_dict())
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    things: list[Any] = [
        {"model": state, "views": [shared[:6], shared.view(3, 4).t()], "n": {1: (1, 2.5, None, True, "x", 2**70)}},
        {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"params": [0]}]},
        {"adascale": {"avg": np.arange(6.0).reshape(2, 3), "one": np.float64(2), "half": np.ones(3, "f2")}},
        [model.weight, torch.Size([2]), torch.float16, torch.device("cpu"), {1, 2}, b"ab", bytearray(b"c"), 1j],
        [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.ones(3, dtype=torch.uint16)],
    ]  # fmt: skip
    made = []
    for thing in things:
        torch.save(thing, folder / "original.pt")
        made.append((folder / "original.pt").read_bytes())
    return made


def tables() -> list[bytes]:
    """Tables of contents of distributed checkpoints, with names as text on the stack and in lines."""
    from shardkit.checkpoint.data_file import Written, metadata_of

    records = [
        Written(("model", "a"), "float32", (4, 3), ((2 * k, 0), (2, 3)), 500 * k, 500, "") for k in range(2)
    ]
    records += [Written(("extra", 0, "b"), None, None, None, 1000, 300, "")]
    found = metadata_of({"__0_0.distcp": records})
    return [pickle.dumps(found), pickle.dumps(found, protocol=2)]


def peak_of(read: Callable[[], object]) -> tuple[object, int]:
    """What a call returns or raises, and the bytes of Python's objects that it took at most."""
    tracemalloc.start()
    try:
        return read(), tracemalloc.get_traced_memory()[1]
    except Exception as error:
        return error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bounded(size: int) -> int:
    """Bytes that reading a pickle of a size may take: objects have about a hundred, and an instruction is a byte."""
    return (1 << 20) + 400 * size


def _flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    start, end = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    return draw.choice(
        [data[:start], data[:start] + data[end:], data + data[start:end], data[:end] + data[start:]]
    )


def _instructions(data: bytes) -> list[bytes]:
    starts = [position or 0 for _, _, position in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def _number(draw: random.Random) -> bytes:
    value = draw.choice([0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -1, -3, -(2**31)])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _reprogrammed(data: bytes, draw: random.Random) -> bytes:
    """Other instructions, names and numbers."""
    ops = _instructions(data)
    for _ in range(draw.randint(1, 4)):
        k, other = draw.randrange(len(ops)), draw.randrange(len(ops))
        what = draw.randrange(8)
        numbers = [i for i, op in enumerate(ops) if op[:1] in b"JKM\x8a"]
        globals_ = [i for i, op in enumerate(ops) if op[:1] == b"c"]
        if what == 0:
            del ops[k : k + draw.randint(1, 3)]
        elif what == 1:
            ops.insert(k, ops[other])
        elif what == 2:
            ops[k], ops[other] = ops[other], ops[k]
        elif what in (3, 4) and numbers:
            ops[draw.choice(numbers)] = _number(draw)
        elif what in (5, 6) and globals_:
            module, name = draw.choice(NAMES).split()
            ops[draw.choice(globals_)] = f"c{module}\n{name}\n".encode()
        else:
            ops.insert(
                k,
                draw.choice(
                    [b"R", b"b", b"\x81", b"0", b"(", b"t", b"\x85", b"\x86", b"N", b"]", b"}", b"Q"]
                ),
            )
        if len(ops) < 2:
            break
    return b"".join(ops)


def _with_pickle_changed(data: bytes, draw: random.Random) -> bytes:
    """Reprogrammed, with right checksums, so that it is not these that find it."""
    if data[:2] != b"PK":
        ends, position = [], 0
        for _ in range(4):
            position += max((p or 0) for _, _, p in pickletools.genops(data[position:])) + 1
            ends.append(position)
        return data[: ends[2]] + _reprogrammed(data[ends[2] : ends[3]], draw) + data[ends[3] :]
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                content = _reprogrammed(content, draw)
            elif "/data/" in entry.filename and draw.random() < 0.05:
                content = content[: draw.randrange(len(content) + 1)]
            new.writestr(entry.filename, content)
    return out.getvalue()


def mutants(seed: int, count: int, folder: Path) -> Iterator[bytes]:
    """The same ones for the same seed."""
    draw, files = random.Random(seed), originals(folder)
    for _ in range(count):
        yield draw.choice([_flipped, _cut, *[_with_pickle_changed] * 4])(draw.choice(files), draw)


# ------------------------------------------------------------ reading, in a process of its own
_DANGEROUS = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.dlopen", "pty.", "webbrowser.")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and any(
        f"{os.sep}{p}{os.sep}" in arguments[0].co_filename for p in ("encodings", "torch")
    ):
        return  # Python's own codecs and torch's own modules, imported late
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event in ("exec", "compile") or event.startswith(_DANGEROUS):
        print(f"reading a file led to {event}{arguments}\n{''.join(traceback.format_stack())}", flush=True)
        os._exit(98)


def _touch(found: Any) -> None:
    """Reads every byte of every tensor and array."""
    import numpy as np

    todo, seen = [found], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple | set):
            todo += value
        elif isinstance(value, np.ndarray | np.generic):
            assert not value.dtype.hasobject
            assert UNWRITTEN not in value.tobytes(), "memory that nobody has written"
        elif isinstance(value, torch.Tensor):
            plain = value.layout == torch.strided and value.device.type == "cpu"
            # an expanded element may stand for more than there is memory
            if plain and value.numel() <= 1 << 20:
                data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert UNWRITTEN not in data, "memory that nobody has written"


def read_all(seed: int, count: int) -> None:
    """Prints what became of the mutants; dies of the first that is neither read nor refused by name."""
    import encodings.cp437  # of zip files  # noqa: F401

    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for data in originals(Path(folder)):  # what is imported late is imported now
            (Path(folder) / "a.pt").write_bytes(data)
            _touch(shardkit.load(Path(folder) / "a.pt"))
        made = list(mutants(seed, count, Path(folder)))
        files = [Path(folder) / f"{k}.pt" for k in range(len(made))]
        for file, data in zip(files, made, strict=True):
            file.write_bytes(data)
        watching = True
        sys.addaudithook(lambda event, arguments: _watch(event, arguments) if watching else None)
        for k, file in enumerate(files):
            try:
                _touch(shardkit.load(file))
                outcomes["read"] += 1
            except shardkit.ShardkitError as error:
                outcomes[type(error).__name__] += 1
            except BaseException as error:
                watching = False
                raise AssertionError(f"mutant {k} of seed {seed}") from error
        watching = False
        outcomes += _read_tables(seed, count // 5, Path(folder))
    print(dict(outcomes))


def _read_tables(seed: int, count: int, folder: Path) -> Counter[str]:
    draw, originals_ = random.Random(seed), tables()
    outcomes: Counter[str] = Counter()

    def read() -> object:
        table = read_metadata(folder)
        return table.nested(dict.fromkeys(table.paths))

    for k in range(count + len(originals_)):
        data = originals_[k % len(originals_)]
        if k >= len(originals_):
            data = draw.choice([_flipped, _cut, *[_reprogrammed] * 4])(data, draw)
        (folder / ".metadata").write_bytes(data)
        found, peak = peak_of(read)
        if peak > bounded(len(data)):
            raise AssertionError(f"table {k} of seed {seed} of {len(data)} bytes took {peak}")
        if isinstance(found, Exception) and not isinstance(found, shardkit.ShardkitError | ValueError):
            raise AssertionError(f"table {k} of seed {seed}") from found
        outcomes[f"table: {type(found).__name__}"] += 1
    return outcomes


def run(seed: int, count: int) -> subprocess.CompletedProcess[str]:
    """Reads mutants in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.file_mutations", "--seed", str(seed), "--count", str(count), "--here"],
        cwd=ROOT, env={**os.environ, "MALLOC_PERTURB_": "165"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.here:
        read_all(options.seed, options.count)
        return 0
    failed, left, seed = 0, options.count, options.seed
    while left > 0:
        done = run(seed, min(BATCH, left))
        failed += done.returncode != 0
        print(
            f"files of seed {seed}: {done.stdout.strip()}"
            + (f" {done.stderr[-2000:]}" if done.returncode else "")
        )
        left, seed = left - BATCH, seed + 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
