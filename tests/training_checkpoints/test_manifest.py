"""shardkit.json: what is read is what was written, and every flipped byte is named."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from shardkit import ConfigurationError, DamagedFileError
from shardkit.checkpoint.format.manifest import (
    SHA256,
    XXH3,
    Manifest,
    ManifestItem,
    StoredFile,
    damages,
    hash_of,
    read_manifest,
    refuse_damage,
    write_manifest,
)


def _verify(folder: Path) -> None:
    refuse_damage(folder, read_manifest(folder))


def _written(folder: Path, kind: str) -> Manifest:
    data, meta = random.Random(0).randbytes(3000), b"of DCP"
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(meta)
    items = tuple(
        ManifestItem(f"model.{i}", i * 1000, 1000, hash_of(data[i * 1000 :][:1000], kind)) for i in range(3)
    )
    files = {
        "__0_0.distcp": StoredFile(3000, "", items),
        ".metadata": StoredFile(len(meta), hash_of(meta, kind)),
    }
    manifest = Manifest(step=17, run="abc", world_size=4, files=files, hash=kind)
    write_manifest(folder, manifest)
    return manifest


@pytest.mark.parametrize("kind", [XXH3, SHA256])
def test_every_flipped_byte_is_found(tmp_path: Path, kind: str) -> None:
    manifest = _written(tmp_path, kind)
    assert manifest == read_manifest(tmp_path)
    _verify(tmp_path)
    draw = random.Random(1)
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        for at in [0, len(whole) - 2, *(draw.randrange(len(whole) - 1) for _ in range(30))]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
            if path.name == "shardkit.json":
                with pytest.raises((DamagedFileError, ConfigurationError)):
                    _verify(tmp_path)
            else:
                (damage,) = damages(tmp_path, manifest)
                assert damage.file == path.name
                assert damage.name == (f"model.{at // 1000}" if path.suffix else None)
        path.write_bytes(whole)
    _verify(tmp_path)


def test_a_file_of_the_first_format(tmp_path: Path) -> None:
    """It had a checksum of all of a file beside those of its items."""
    now = _written(tmp_path, SHA256)
    whole = hash_of((tmp_path / "__0_0.distcp").read_bytes(), SHA256)
    files = {n: dataclasses.replace(f, hash=whole) if f.items else f for n, f in now.files.items()}
    write_manifest(tmp_path, dataclasses.replace(now, files=files, format=1))
    assert read_manifest(tmp_path).format == 1
    _verify(tmp_path)
    (tmp_path / "__0_0.distcp").write_bytes(bytes(3000))
    with pytest.raises(DamagedFileError, match="other bytes"):
        _verify(tmp_path)


def test_files_that_are_cut_or_gone(tmp_path: Path) -> None:
    _written(tmp_path, SHA256)
    (tmp_path / "__0_0.distcp").write_bytes((tmp_path / "__0_0.distcp").read_bytes()[:1500])
    (tmp_path / ".metadata").unlink()
    assert [str(d) for d in damages(tmp_path, read_manifest(tmp_path))] == [
        ".metadata is missing",
        "__0_0.distcp (model.1) is cut off: the file has 1500 bytes of 3000",
        "__0_0.distcp (model.2) is cut off: the file has 1500 bytes of 3000",
    ]
    with pytest.raises(DamagedFileError, match="metadata is missing"):
        _verify(tmp_path)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        _verify(tmp_path)
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        _verify(tmp_path / "nowhere")
    manifest = _written(tmp_path, SHA256)
    text = (tmp_path / "shardkit.json").read_text()
    assert text.count('"format": 2') == 1
    (tmp_path / "shardkit.json").write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(ConfigurationError, match="later one wrote it"):
        _verify(tmp_path)
    (tmp_path / "shardkit.json").write_text(text.replace("__0_0.distcp", "../elsewhere"))
    with pytest.raises(DamagedFileError, match="no name of a file"):
        _verify(tmp_path)
    assert manifest.step == 17
