"""Traces of the real fairscale, kept: what is drawn is the same in every run, and so is what fairscale makes of it.

A record's name is a digest of the program, of everything that makes the trace (the sources of this language, how
fairscale's ranks start) and of the versions of fairscale and torch. So a stale record is never found: the trace is
computed, as it is for a program that nobody has drawn before. Where fairscale goes on from a checkpoint, the record has
that, too, and counts only for one that is equal. Processors round differently, and a few programs make much of it (a
sign decides a step of Rprop): what differs from a record is compared with fairscale itself. ``python -m
tests.programs.records`` (part of ``make fuzz``) writes all records anew; ``tests/differential/test_records.py`` says
when that is due.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import lzma
import os
import pickle
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from shardkit.tools.verify.comparing import SINGLE, Difference, check_value

from .result import Checkpoint, RankRun, Saved

HERE = Path(__file__).parent
FILE = HERE.parent / "differential" / "fairscale_traces.zip"
TESTS = ("test_fsdp.py", "test_fsdp_checkpoints.py", "test_oss.py", "test_sharded_ddp.py")
_SOURCES = (
    "course",
    "leaves",
    "models",
    "optimizers",
    "owning_ranks",
    "ranks",
    "result",
    "spec",
    "unit_ranks",
)
_WRITE = os.environ.get("SHARDKIT_RECORD")  # a file: compute everything, and write it there
_counts = {"found": 0, "unwanted": 0}  # traces on record; calls that want none

R = TypeVar("R")
A = ParamSpec("A")


# ------------------------------------------------------------------------------------------------ packing
def _tensor(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    dense = flat.reshape(shape)
    return dense if strides is None else torch.empty_strided(shape, strides, dtype=kind).copy_(dense)


class _Pickler(pickle.Pickler):
    """Tensors by dtype, shape and bytes; what is the same on all ranks stands there once."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._seen: dict[bytes, bytes] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        dense = value.detach().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        strides = None if value.is_contiguous() else tuple(value.stride())
        return _tensor, (
            str(value.dtype).split(".")[1], tuple(value.shape), strides, self._seen.setdefault(data, data)
        )  # fmt: skip


def packed(value: Any) -> bytes:
    """As few bytes."""
    file = BytesIO()
    _Pickler(file).dump(value)
    return lzma.compress(file.getvalue(), lzma.FORMAT_ALONE)


def unpacked(data: bytes) -> Any:
    return pickle.loads(lzma.decompress(data))


# ------------------------------------------------------------------------------------------------ looking up
@functools.cache
def sources() -> str:
    """A digest of the code that makes a trace."""
    import shardkit.tools.verify.fairscale_ranks

    files = [HERE / f"{name}.py" for name in _SOURCES] + [
        Path(shardkit.tools.verify.fairscale_ranks.__file__)
    ]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


@functools.cache
def versions() -> str:
    return f"{importlib.metadata.version('fairscale')} {torch.__version__.split('+')[0]} {platform.machine()}"


def name_of(what: str) -> str:
    """A record's name."""
    return hashlib.sha256(f"{what}\n{sources()}\n{versions()}".encode()).hexdigest()[:32]


@functools.cache
def _records() -> zipfile.ZipFile | None:
    return zipfile.ZipFile(FILE) if FILE.exists() else None


def written_from() -> list[str]:
    """Digest of the sources, and versions, that the records were made from."""
    records = _records()
    return records.comment.decode().splitlines() if records is not None else []


def recorded(
    what: str, given: Checkpoint | Saved | None, compute: Callable[[], list[RankRun]]
) -> list[RankRun]:
    """A trace: the one on record, or computed.

    Args:
        what: says all that the trace depends on, but for the code.
        given: what the run goes on from.
    """
    name, records = name_of(what), _records()
    if _WRITE is None:
        if records is not None and name in records.NameToInfo and not _counts["unwanted"]:
            kept, runs = unpacked(records.read(name))
            if _equal(given, kept):
                _counts["found"] += 1
                return runs
        return compute()
    runs = compute()
    with zipfile.ZipFile(_WRITE, "a") as file:
        if name not in file.NameToInfo:
            file.writestr(zipfile.ZipInfo(name), packed((given, runs)))
        file.comment = f"{sources()}\n{versions()}".encode()
    return runs


def or_computed(check: Callable[A, R]) -> Callable[A, R]:
    """A check that is made once more, with traces that are computed, where those on record differ."""

    @functools.wraps(check)
    def checked(*args: A.args, **kwargs: A.kwargs) -> R:
        before = _counts["found"]
        try:
            return check(*args, **kwargs)
        except Difference:
            if _counts["found"] == before:
                raise
        _counts["unwanted"] += 1
        try:
            return check(*args, **kwargs)
        finally:
            _counts["unwanted"] -= 1

    return checked


def _equal(given: Checkpoint | Saved | None, kept: Checkpoint | Saved | None) -> bool:
    """Whether they are the same in form, and in values up to rounding."""
    if given is None or kept is None:
        return given is kept
    try:
        check_value("checkpoint", vars(given), vars(kept), SINGLE)
    except Difference:
        return False
    return True


def main() -> int:
    """Runs what compares with fairscale, and keeps its traces; 0 if all of it passed."""
    fresh = FILE.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    tests = [str(FILE.parent / name) for name in TESTS]
    environment = {**os.environ, "SHARDKIT_RECORD": str(fresh)}
    environment.pop("SHARDKIT_FUZZ", None)
    status = subprocess.call([sys.executable, "-m", "pytest", "-q", *tests], env=environment)
    if status == 0:
        fresh.replace(FILE)
    return status


if __name__ == "__main__":
    sys.exit(main())
