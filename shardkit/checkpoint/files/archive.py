"""The two formats of ``torch.save``: a zip of records with checksums, and before torch 1.6 a row of pickles.

A reader has ``pickle()``, the source of the object's pickle, and ``fill()``, which reads the bytes of one storage,
compares their checksum and says what is wrong; so the reader of the whole can name the tensor. Where the file has to be
read to know what is in it, ``expect()`` is told the storages first, and ``missing()`` says which are not there.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from typing import IO, BinaryIO, NoReturn, cast

import torch

from ...torch_seams.strided_views import memory_of
from ...types import Tree
from .data_pickle import NotData, PickleMachine

LOCAL = b"PK\x03\x04"
_HEADER = 30  # bytes of a local header before the name; lengths of name and extra field end it
_PIECE = 1 << 22
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


class Damage(Exception):
    """A file is not what was written; the arguments say how."""


def _read_into(file: BinaryIO, start: int, storage: torch.UntypedStorage) -> int:
    """Fills a storage from a file; returns the CRC-32 of what was read."""
    if storage.nbytes() == 0:
        return 0
    view, crc, done = memory_of(torch.empty(0, dtype=torch.uint8).set_(storage)), 0, 0
    file.seek(start)
    while done < len(view):
        piece = view[done : done + _PIECE]
        count = file.readinto(piece)  # type: ignore[attr-defined]
        if not count:
            view[done:] = bytes(len(view) - done)
            raise Damage(f"it ends {len(view) - done} bytes too early")
        crc = zlib.crc32(piece[:count], crc)
        done += count
    return crc


class View:
    """Some bytes of a file, as a file; so many that are read, or those that are written from ``start`` on."""

    def __init__(self, file: BinaryIO, start: int, length: int = 0) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data

    def readinto(self, target: memoryview) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def write(self, data: bytes | memoryview) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.write(data)
        self._at += count
        return count

    def flush(self) -> None:
        self._file.flush()

    def seekable(self) -> bool:
        return True


class Archive:
    """A zip file of records that are not compressed; a record's CRC-32 is the zip's own."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError) as error:
            raise Damage("its table of contents is missing or unreadable") from error
        entries = self._zip.infolist()
        if sum(e.compress_size for e in entries) > size or any(e.compress_type for e in entries):
            raise Damage("its records overlap or are compressed, which torch.save doesn't do")
        if not all(0 <= e.header_offset < size for e in entries):
            raise Damage("its table of contents names records outside of it")
        # torch can be told to leave checksums out; then all are zero.
        self._has_checksums = any(e.CRC for e in entries)
        pickles = [
            e.filename for e in entries if e.filename.endswith("data.pkl") and e.filename.count("/") == 1
        ]
        if len(pickles) != 1:
            raise Damage("it has no data.pkl, so that torch.save has not written it")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if self._prefix + "constants.pkl" in self._zip.NameToInfo:
            raise NotData("a TorchScript program")
        order = self._prefix + "byteorder"
        if order in self._zip.NameToInfo and self._record("byteorder") != b"little":
            raise Damage("its record 'byteorder' is not 'little', the only order that is read")

    def pickle(self) -> IO[bytes]:
        return io.BytesIO(self._record("data.pkl"))

    def where(self, key: str) -> tuple[int, int, int | None]:
        """Finds first byte, number of bytes and CRC-32 (None: the file has none) of a storage."""
        entry = self._entry(key)
        return self._start(entry), entry.file_size, entry.CRC if self._has_checksums else None

    def fill(self, key: str, storage: torch.UntypedStorage) -> None:
        """Reads a storage; raises Damage where something is wrong with it."""
        entry = self._entry(key)
        if entry.file_size != storage.nbytes() or entry.compress_size != entry.file_size:
            raise Damage(f"its record data/{key} has {entry.file_size} bytes, expected {storage.nbytes()}")
        crc = _read_into(self._file, self._start(entry), storage)
        if self._has_checksums and crc != entry.CRC:
            raise Damage(f"the checksum of its record data/{key} is {crc:#010x}, expected {entry.CRC:#010x}")

    def _entry(self, key: str) -> zipfile.ZipInfo:
        entry = self._zip.NameToInfo.get(f"{self._prefix}data/{key}")
        if entry is None:
            raise Damage(f"its record data/{key} is missing")
        return entry

    def _start(self, entry: zipfile.ZipInfo) -> int:
        self._file.seek(entry.header_offset)
        header = self._file.read(_HEADER)
        if len(header) < _HEADER or header[:4] != LOCAL:
            raise Damage(f"there is no record where {entry.filename} should begin")
        name, extra = struct.unpack("<HH", header[26:])
        if self._file.read(name) != entry.orig_filename.encode():
            raise Damage(f"there is another record where {entry.filename} should begin")
        return entry.header_offset + _HEADER + name + extra

    def _record(self, name: str) -> bytes:
        entry = self._zip.NameToInfo[self._prefix + name]
        self._file.seek(self._start(entry))
        data = self._file.read(min(entry.file_size, self._size))
        if len(data) < entry.file_size:
            raise Damage(f"its record {name} ends {entry.file_size - len(data)} bytes too early")
        if self._has_checksums and zlib.crc32(data) != entry.CRC:
            raise Damage(f"the checksum of its record {name} is not the one that was written")
        return data


class Legacy:
    """Pickles in a row (magic number, protocol, facts about the machine, the object, its storages' names), then their
    bytes. There are no checksums, only sizes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        facts = [self._plain() for _ in range(3)]
        if facts[0] != _MAGIC or facts[1] != _PROTOCOL or type(facts[2]) is not dict:
            raise Damage("it has neither of torch.save's formats")
        if facts[2].get("little_endian") is not True:
            raise Damage("it was written on a machine with another byte order")
        self._expected: dict[str, tuple[int, int]] = {}
        self._begins: dict[str, int] = {}

    def _plain(self) -> Tree:
        def nothing(*_: object) -> NoReturn:
            raise NotData("an object where the head of the file should be")

        return PickleMachine({}, nothing, nothing).run(self.pickle())

    def pickle(self) -> IO[bytes]:
        """Returns the object's pickle, which comes next."""
        return cast(IO[bytes], self._map)  # it has what a file has

    def expect(self, key: str, size: int, itemsize: int) -> None:
        """Notes a storage that the pickle names: its bytes, and those of an element."""
        self._expected[key] = (size, itemsize)

    def missing(self, after: int) -> list[tuple[str, str]]:
        """Returns the storages that are not there, or of another size; they stand behind the object's pickle."""
        self._map.seek(after)
        try:
            keys = self._plain()
        except (ValueError, IndexError):
            keys = []
        if type(keys) is not list or any(type(k) is not str for k in keys) or set(keys) - set(self._expected):
            raise Damage("the list of its storages is unreadable")
        wrong, at = [], self._map.tell()
        for key in keys:
            size, itemsize = self._expected[key]
            head = self._map[at : at + 8]
            if len(head) == 8 and struct.unpack("<q", head)[0] * itemsize != size:
                wrong.append(
                    (key, f"it has {struct.unpack('<q', head)[0]} elements, expected {size // itemsize}")
                )
                break  # nothing is where it should be from here on
            if at + 8 + size > self._size:
                wrong.append((key, "it is cut off"))
            self._begins[key] = at + 8
            at += 8 + size
        return wrong + [(key, "it is missing") for key in self._expected if key not in keys]

    def where(self, key: str) -> tuple[int, int, int | None]:
        """Finds first byte and number of bytes of a storage, which has no checksum; see ``missing()``."""
        return self._begins[key], self._expected[key][0], None

    def fill(self, key: str, storage: torch.UntypedStorage) -> None:
        """Reads a storage; raises Damage where it is cut off."""
        _read_into(self._file, self._begins[key], storage)
