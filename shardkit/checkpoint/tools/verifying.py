"""Compares each file of a checkpoint with its checksums, those of shardkit.json or those that the files have."""

from __future__ import annotations

import dataclasses
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ..files.archive import View
from ..format import folders
from ..format.manifest import NAME as MANIFEST
from ..format.manifest import DamagedItem, Manifest, damages, read_manifest
from ..format.metadata import METADATA, Record, read_metadata
from . import hugging_face
from .opening import files_of_ranks
from .stored import StoredTensor, leaves
from .torch_files import read_torch_file


@dataclasses.dataclass
class Verified:
    """A report on one checkpoint.

    Attributes:
        path: of one checkpoint.
        damages: none, where all that could be compared is as it was written.
        files, items, bytes: that were looked at.
        limits: what could not be compared, in words.
    """

    path: str
    damages: list[DamagedItem] = dataclasses.field(default_factory=list)
    files: int = 0
    items: int = 0
    bytes: int = 0
    limits: list[str] = dataclasses.field(default_factory=list)

    def look_at(self, path: str, items: int) -> None:
        """Takes note of a file."""
        self.files += 1
        self.items += items
        self.bytes += os.path.getsize(path) if os.path.exists(path) else 0


def verify(path: str) -> list[Verified]:
    """Verifies each checkpoint at a path; of a folder of steps, all that were complete when they were written.

    Raises:
        ConfigurationError: there is none.
    """
    is_one = any(os.path.exists(os.path.join(path, n)) for n in (METADATA, MANIFEST))
    if not is_one and folders.steps_in(path):
        complete = folders.complete(path)
        if not complete:
            raise ConfigurationError(f"{path} has no complete step: each folder lacks its {MANIFEST}")
        return [_of_shardkit(step) for step in complete.values()]
    if os.path.exists(os.path.join(path, MANIFEST)):
        return [_of_shardkit(path)]
    if os.path.exists(os.path.join(path, METADATA)):
        return [_of_dcp(path)]
    if os.path.exists(path) and hugging_face.weight_files(path):
        return [_of_hugging_face(path)]
    return [_of_torch_files(path, files_of_ranks(path))]


# ------------------------------------------------------------ with shardkit.json
def _of_shardkit(folder: str) -> Verified:
    result = Verified(folder)
    try:
        manifest = read_manifest(folder)
    except DamagedFileError as error:
        # its checksums of other files may be what is damaged
        result = _of_dcp(folder)
        result.damages.insert(0, DamagedItem(MANIFEST, None, str(error)))
        return result
    result.look_at(os.path.join(folder, MANIFEST), 0)
    for name, stored in manifest.files.items():
        result.look_at(os.path.join(folder, name), len(stored.items))
    result.damages += damages(folder, manifest)
    if not result.damages:
        result.damages += _not_listed(folder, manifest)
    return result


def _not_listed(folder: str, manifest: Manifest) -> Iterator[DamagedItem]:
    """Finds records in the table of contents that were not compared."""
    if METADATA not in manifest.files:
        yield DamagedItem(MANIFEST, None, f"doesn't name {METADATA}")
        return
    known = {
        (name, item.name, item.offset, item.length) for name, f in manifest.files.items() for item in f.items
    }
    for record in read_metadata(folder).records():
        if (record.file, record.name, record.offset, record.length) not in known:
            yield DamagedItem(
                record.file, record.name, f"is in {METADATA}, and {MANIFEST} has no checksum of it"
            )


# ------------------------------------------------------------ without
def _of_dcp(folder: str) -> Verified:
    result = Verified(folder)
    result.limits.append(
        f"without a whole {MANIFEST}, compared is the CRC-32 that torch.save leaves with each tensor and object; "
        f"{METADATA} itself, and bytes between tensors, have none"
    )
    try:
        records = sorted(read_metadata(folder).records())
    except ShardkitError as error:
        result.damages.append(DamagedItem(METADATA, None, str(error)))
        return result
    result.look_at(os.path.join(folder, METADATA), 0)
    for name in sorted({record.file for record in records}):
        result.look_at(os.path.join(folder, name), sum(record.file == name for record in records))
    for record in records:
        try:
            record.check(folder)
            _compare(folder, record)
        except DamagedFileError as error:
            result.damages.append(DamagedItem(record.file, record.name, str(error)))
    return result


def _compare(folder: str, record: Record) -> None:
    """Compares all that is in the zip that torch.save wrote; nothing of it is interpreted."""
    with open(os.path.join(folder, record.file), "rb") as file:
        try:
            archive = zipfile.ZipFile(cast(BinaryIO, View(file, record.offset, record.length)))
            if any(entry.CRC for entry in archive.infolist()):  # torch can be told to leave them out
                bad = archive.testzip()
                if bad is not None:
                    raise DamagedFileError(f"has other bytes than were written (its record {bad})")
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OSError, struct.error) as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError(f"is no file of torch.save any more ({error})") from None


def _of_torch_files(path: str, files: list[str]) -> Verified:
    result = Verified(path)
    result.limits.append("compared is the CRC-32 that torch.save leaves with each tensor")
    for file in files:
        tensors = []
        try:
            tensors = [v for _, v in leaves(read_torch_file(file)) if isinstance(v, StoredTensor)]
        except DamagedFileError as error:
            result.damages.append(DamagedItem(os.path.basename(file), None, str(error)))
        result.look_at(file, len(tensors))
        for tensor in tensors:
            try:
                tensor.read()
            except DamagedFileError as error:
                result.damages.append(DamagedItem(os.path.basename(file), tensor.name, str(error)))
    return result


def _of_hugging_face(path: str) -> Verified:
    result = Verified(path)
    result.limits.append("safetensors files have no checksums: compared are sizes, and names with the index")
    for file in hugging_face.weight_files(path):
        name = os.path.basename(file)
        try:
            if not os.path.exists(file):
                result.damages.append(DamagedItem(name, None, "is missing"))
            elif file.endswith(".safetensors"):
                result.look_at(file, len(hugging_face.read_safetensors(file)))
            else:
                result.damages += _of_torch_files(path, [file]).damages
        except ShardkitError as error:
            result.damages.append(DamagedItem(name, None, str(error)))
    if not result.damages:
        try:
            hugging_face.read_weights(path)
        except ShardkitError as error:
            result.damages.append(DamagedItem(hugging_face.INDEX, None, str(error)))
    return result
