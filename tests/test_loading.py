"""Reading files without running what they say."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import UntrustedFileError
from shardkit.xla.fsdp.consolidate_sharded_ckpts import main as consolidate

np = pytest.importorskip("numpy")


class Calls:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def test_state_dicts_are_data(tmp_path: Path) -> None:
    scalar = {"half": np.float16(2), "int": np.int64(3), "bool": np.bool_(True)}
    arrays = {
        d: np.arange(6).reshape(2, 3).astype(d) for d in ("f2", "f4", "f8", "i1", "i8", "u1", "bool", "c8")
    }
    state = {
        "t": torch.arange(3.0),
        "n": {1: [1, 2.5, None, "x", torch.float16, torch.Size([2])]},
        **scalar,
        **arrays,
    }
    torch.save(state, tmp_path / "a.pt")
    allowed = torch.serialization.get_safe_globals()
    got = shardkit.load(tmp_path / "a.pt")
    assert got.keys() == state.keys()
    assert torch.equal(got["t"], state["t"])
    assert got["n"] == state["n"]
    for name in (*scalar, *arrays):
        assert got[name].dtype == state[name].dtype
        assert np.array_equal(got[name], state[name])
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # nothing stays allowed


@pytest.mark.parametrize("zipped", [True, False])
def test_what_calls_is_refused(tmp_path: Path, zipped: bool) -> None:
    file, folder = tmp_path / "a.pt", tmp_path / "made"
    torch.save({"state": Calls(folder)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UntrustedFileError, match=rf"{file} is not read.*posix\.mkdir.*trust_pickle=True"):
        shardkit.load(file)
    assert not folder.exists()
    shardkit.load(file, trust_pickle=True)
    assert folder.exists()


def test_arrays_of_objects_and_modules_are_refused(tmp_path: Path) -> None:
    for thing in (np.array([{}, Calls(tmp_path / "made")], dtype=object), nn.Linear(1, 1), np.dtype("O")):
        torch.save(thing, tmp_path / "a.pt")
        with pytest.raises(UntrustedFileError):
            shardkit.load(tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Calls(tmp_path / "made"), protocol=2))
    with pytest.raises(UntrustedFileError):
        shardkit.load(tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        shardkit.load(tmp_path / "a.pt")


def test_consolidation_reads_data_only(tmp_path: Path) -> None:
    shard = {"weight": torch.arange(3.0)}
    metadata = {"rank": 0, "world_size": 1, "extra": Calls(tmp_path / "made")}
    torch.save({"model": shard, "shard_metadata": metadata}, tmp_path / "a_rank-0-of-1.pth")
    arguments = ["--ckpt_prefix", str(tmp_path / "a"), "--ckpt_suffix", "_rank-*.pth"]
    with pytest.raises(UntrustedFileError, match="--trust-pickle"):
        consolidate(arguments)
    assert not (tmp_path / "made").exists()
    consolidate([*arguments, "--trust-pickle"])
    assert shardkit.load(tmp_path / "a_consolidated.pth")["model"].keys() == shard.keys()


def test_it_holds_whatever_torchs_default_is(tmp_path: Path) -> None:
    """An environment variable can turn torch's own caution off."""
    file, folder = tmp_path / "a.pt", tmp_path / "made"
    torch.save(Calls(folder), file)
    code = f"import shardkit\ntry: shardkit.load({str(file)!r})\nexcept shardkit.UntrustedFileError: print('refused')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).resolve().parents[1], env={**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    )  # fmt: skip
    assert done.stdout == "refused\n", done.stdout + done.stderr
    assert not folder.exists()
