"""Damage is named, by file and tensor; a conversion that is killed leaves nothing under the target's name."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardkit.checkpoint.format.metadata import read_metadata
from shardkit.checkpoint.tools import Conversion, convert, open_checkpoint, verify
from shardkit.errors import DamagedFileError, ShardkitError
from tests.checkpoint_tools.samples import make


def _flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << position % 8)]))


def test_every_flipped_byte_is_named(tmp_path: Path) -> None:
    folder = Path(make("shardkit", tmp_path))
    (whole,) = verify(str(folder))
    assert whole.damages == []
    items = list(read_metadata(folder).records())
    files = sorted(folder.iterdir())
    sizes = [file.stat().st_size for file in files]
    drawn = random.Random(5)
    for file, position in [
        (f, drawn.randrange(f.stat().st_size)) for f in drawn.choices(files, sizes, k=200)
    ]:
        names = {i.name for i in items if i.file == file.name and i.offset <= position < i.offset + i.length}
        assert names or not file.name.endswith(".distcp")
        _flip(file, position)
        (found,) = verify(str(folder))
        named = {(d.file, d.name) for d in found.damages}
        assert (file.name, next(iter(names), None)) in named, (file, position)
        assert {f for f, _ in named} == {file.name}
        _flip(file, position)
    (whole,) = verify(str(folder))
    assert whole.damages == []


def test_what_is_read_was_compared(tmp_path: Path) -> None:
    """The table of contents with shardkit.json, tensors and objects with their own checksums."""
    folder = Path(make("shardkit", tmp_path))
    expected = {name: tensor.read() for name, tensor in open_checkpoint(str(folder)).tensors()}
    items = list(read_metadata(folder).records())
    drawn, refused = random.Random(6), []
    for _ in range(150):
        file = drawn.choice(sorted(folder.iterdir()))
        position = drawn.randrange(file.stat().st_size)
        _flip(file, position)
        try:
            found = {name: tensor.read() for name, tensor in open_checkpoint(str(folder)).tensors()}
        except DamagedFileError as error:
            names = [i.name for i in items if i.file == file.name and 0 <= position - i.offset < i.length]
            refused.append((str(error), [*names, file.name][0]))
        else:  # a byte that nothing is made of, as of the padding in front of a tensor
            assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in expected.items()}
        _flip(file, position)
    assert len(refused) > 100
    assert [(error, name) for error, name in refused if name not in error] == []


def test_missing_and_cut_files(tmp_path: Path) -> None:
    folder = Path(make("shardkit", tmp_path))
    data = folder / "__0_0.distcp"
    kept = data.read_bytes()
    data.write_bytes(kept[:-700])
    (found,) = verify(str(folder))
    assert {d.file for d in found.damages} == {data.name}
    assert any("extra" in str(d.name) for d in found.damages)
    with pytest.raises(DamagedFileError, match="is cut off"):
        open_checkpoint(str(folder))
    data.unlink()
    (found,) = verify(str(folder))
    assert [(d.file, d.what) for d in found.damages] == [(data.name, "is missing")]


@pytest.mark.parametrize("kind", ["dcp", "torch", "xla", "fairscale"])
def test_what_torch_wrote_has_checksums_of_tensors(kind: str, tmp_path: Path) -> None:
    """And conversions compare them."""
    path = Path(make(kind, tmp_path))
    (found,) = verify(str(path))
    assert found.damages == []
    assert found.limits
    tensor = open_checkpoint(str(path)).model["hidden.weight"]
    place = tensor.parts[0].where()
    _flip(Path(place.path), place.offset + 5)
    (found,) = verify(str(path))
    assert [d.file for d in found.damages] == [os.path.basename(place.path)]
    assert "hidden" in str(found.damages[0].name)
    if kind in ("dcp", "torch"):
        with pytest.raises(DamagedFileError, match=r"hidden\.weight.*has other bytes"):
            convert(str(path), str(tmp_path / "out"), Conversion("hf"))
        assert not (tmp_path / "out").exists()


def test_hugging_face_files_have_sizes_alone(tmp_path: Path) -> None:
    path = Path(make("hf", tmp_path))
    (found,) = verify(str(path))
    assert found.damages == []
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    (found,) = verify(str(path))
    assert [d.file for d in found.damages] == [file.name]
    file.unlink()
    (found,) = verify(str(path))
    assert [(d.file, d.what) for d in found.damages] == [(file.name, "is missing")]


def test_random_bytes_raise_errors_of_shardkit(tmp_path: Path) -> None:
    """Of whatever kind: no other error, and no tensor of a size that no file has."""
    drawn = random.Random(8)
    for kind in ("dcp", "torch", "hf", "fairscale"):
        path = Path(make(kind, tmp_path))
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for _ in range(40):
            file = drawn.choice(files)
            # the heads, where what is read first is
            position = drawn.randrange(min(file.stat().st_size, 3000))
            _flip(file, position)
            try:
                for _, tensor in open_checkpoint(str(path)).tensors():
                    tensor.read()
            except ShardkitError:
                pass
            _flip(file, position)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_killed_conversion_leaves_nothing(tmp_path: Path) -> None:
    torch.save({f"layer{k}": torch.randn(500_000) for k in range(40)}, tmp_path / "source")
    for target, moment in (("hf", 0.02), ("dcp", 0.05), ("torch", 0.03), ("xla", 0.01)):
        path = tmp_path / "out"
        ranks = ["--ranks", "2"] if target == "xla" else []
        command = [sys.executable, "-m", "shardkit", "ckpt", "convert", str(tmp_path / "source"), str(path)]
        process = subprocess.Popen([*command, "--to", target, *ranks], stdout=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while not (hidden := list(tmp_path.glob(".out.*"))) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.002)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert hidden
        assert not path.exists()
    convert(str(tmp_path / "source"), str(tmp_path / "out"), Conversion("dcp"))
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"source", "out"}, "what the killed ones left is removed by the next one"
