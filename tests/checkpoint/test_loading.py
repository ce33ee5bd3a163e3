"""Reading files without running what they say."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.checkpoint.data_file import Written, metadata_of
from shardkit.checkpoint.format.metadata import TableOfContents, read_metadata
from shardkit.checkpoint.tools.comparing import read_folder
from shardkit.errors import ConfigurationError, DamagedFileError, ShardkitError, UntrustedFileError
from shardkit.xla.fsdp.consolidate_sharded_ckpts import main as consolidate
from tests import file_mutations

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


def test_what_calls_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.pt", tmp_path / "made"
    torch.save({"state": Calls(folder)}, file)
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
    with pytest.raises(DamagedFileError, match=r"torch\.save has not written it"):
        shardkit.load(tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


def forged(path: Path, program: bytes, **records: bytes) -> Path:
    """A file in torch's zip format whose checksums are right."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + program + b".")
        for name, data in records.items():
            file.writestr(f"a/data/{name}", data)
    return path


# Pickle instructions: "c" a name, "(...t" a tuple, "K" a number, "R" a call, "b" a state, "Q" a storage.
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x02tQ"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tX\x01\x00\x00\x00btR(K\x01(K\x02t"


@pytest.mark.parametrize(
    ("program", "error", "what"),
    [  # what is made: uninitialised arrays and tensors, views of foreign memory, objects from bytes
        (b"cnumpy\nndarray\n(K\x08tR", UntrustedFileError, "a call of what is no function"),
        (b"ctorch\nFloatTensor\nK\x40\x85R", UntrustedFileError, "torch.FloatTensor"),
        (b"ctorch.storage\nUntypedStorage\nK\x40\x85R", UntrustedFileError, "a call of what is no function"),
        (
            b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x00K\x09\x85K\x01\x85tR",
            DamagedFileError, "goes beyond its storage",
        ),
        (
            b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x01K\x02\x85K\x01\x85tR",
            DamagedFileError, "goes beyond its storage",
        ),
        (
            b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"J\xff\xff\xff\xffK\x01\x85K\x01\x85tR",
            DamagedFileError, "offset -1",
        ),
        (
            b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x00K\x02\x85K\x01\x85tR(K\x00K\x01tb",
            UntrustedFileError, "the state of a Tensor",
        ),
        (
            ARRAY + b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8tR\x89X\x10\x00\x00\x00aaaaaaaaaaaaaaaatb",
            UntrustedFileError, "O8, which are no numbers",
        ),
        (
            ARRAY + b"cnumpy\ndtype\n(X\x02\x00\x00\x00f8tR\x89c_codecs\nencode\n(X\x02\x00\x00\x00abX\x06\x00"
            b"\x00\x00latin1tRtb",
            DamagedFileError, "and 2 bytes",
        ),
        (b"c_codecs\nencode\n(X\x02\x00\x00\x00abX\x03\x00\x00\x00zlbtR", UntrustedFileError, "text in zlb"),
        (b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R", UntrustedFileError, "text in"),
        (b"}(((K\x01ttK\x02u", UntrustedFileError, "a key of type tuple"),
        (b"}(K\x01u", DamagedFileError, "a key without a value"),
    ],
    ids=["ndarray", "float-tensor", "untyped-storage", "size", "offset", "negative", "state", "objects", "short",
         "codec", "bytearray", "key", "odd"],
)  # fmt: skip
def test_what_torch_allows_and_data_needs_not(
    tmp_path: Path, program: bytes, error: type[Exception], what: str
) -> None:
    """numpy.ndarray(8) and torch.FloatTensor(64) are memory that nobody has written; arrays of objects, a crash."""
    with pytest.raises(error, match=re.escape(what)):
        shardkit.load(forged(tmp_path / "a.pt", program, **{"0": b"12345678"}))


def test_messages_do_not_spell_out_what_is_foreign(tmp_path: Path) -> None:
    """A list of two lists of two lists ...: 2**60 brackets."""
    doubled = b"".join(b"](h" + bytes([k]) + b"h" + bytes([k]) + b"eq" + bytes([k + 1]) for k in range(60))
    lists = b"(]q\x00" + doubled + b"t"
    for call in (b"_codecs\nencode\n(X\x01\x00\x00\x00x", b"numpy\ndtype\n(", b"torch.serialization\n_get_layout\n(",
                 b"torch\nSize\n(", b"torch\ndevice\n("):  # fmt: skip
        with pytest.raises(ShardkitError):
            shardkit.load(forged(tmp_path / "a.pt", lists + b"c" + call + b"h\x3ctR"))


def test_forged_arrays_that_are_right_are_read(tmp_path: Path) -> None:
    """The programs above fail for what they say, not for being written by hand."""
    tensor = b"ctorch._utils\n_rebuild_tensor\n(" + STORAGE + b"K\x01K\x03\x85K\x00\x85tR"
    got = shardkit.load(forged(tmp_path / "a.pt", tensor, **{"0": np.arange(2, dtype="f4").tobytes()}))
    assert got.tolist() == [1, 1, 1]
    array = (
        ARRAY + b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1tR\x89c_codecs\nencode\n(X\x02\x00\x00\x00ab"
        b"X\x06\x00\x00\x00latin1tRtb"
    )
    assert shardkit.load(forged(tmp_path / "a.pt", array)).tolist() == [97, 98]


def test_everything_in_state_dicts_comes_back(tmp_path: Path) -> None:
    shared = torch.arange(12.0)
    model = nn.Linear(3, 2)
    state = model.state_dict()
    things = {
        "model": state, "shared": [shared[2:8], shared.view(3, 4).t()], "parameter": model.weight,
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()], "set": {1, "a"}, "c": 1j, "b": b"\xff\x00",
        "bytes": [b"", bytearray(b"c")], "long": 2**70, "device": torch.device("cuda", 1), "layout": torch.sparse_coo,
        "small": [torch.ones(2, dtype=d) for d in (torch.uint16, torch.bfloat16, torch.float8_e5m2, torch.complex64)],
        "empty": [torch.empty(0), torch.empty(3, 0), torch.tensor(2)], "counted": Counter("aab"), "k": {(1, "a"): 1},
        "meta": torch.empty(3, device="meta"), "big": np.arange(3, dtype=">f8"), "f": np.asfortranarray(np.eye(2)[:1]),
    }  # fmt: skip
    tagged = torch.ones(2)
    tagged.owner = {"rank": 1}  # type: ignore[attr-defined]
    things["tagged"] = tagged
    torch.save(things, tmp_path / "a.pt")
    ours, torchs = shardkit.load(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=False)

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type != "meta":
            dense = x.detach().to_dense().float() if x.dtype.itemsize == 1 else x.detach().to_dense()
            return type(x), x.dtype, x.layout, x.stride() if x.layout == torch.strided else 0, dense.tolist()
        if isinstance(x, dict):
            return type(x), {k: plain(v) for k, v in x.items()}, {**getattr(x, "__dict__", {})}
        if isinstance(x, list | tuple):
            return type(x), [plain(v) for v in x]
        return type(x), getattr(x, "dtype", 0), str(x)

    assert plain(ours) == plain(torchs)
    assert ours["tagged"].owner == {"rank": 1}
    assert ours["shared"][0].untyped_storage().data_ptr() == ours["shared"][1].untyped_storage().data_ptr()
    assert ours["parameter"].requires_grad
    assert ours["parameter"].data_ptr() == ours["model"]["weight"].data_ptr()
    ours["shared"][0].untyped_storage().resize_(0)  # it is a storage like any other
    torch.save(state, tmp_path / "a.pt")
    assert shardkit.load(tmp_path / "a.pt", map_location="meta")["weight"].device.type == "meta"
    assert shardkit.load(tmp_path / "a.pt", map_location=None)["weight"].device.type == "cpu"
    with pytest.raises(ConfigurationError, match="can't go to 'vulkan'"):
        shardkit.load(tmp_path / "a.pt", map_location="vulkan")


# ------------------------------------------------------------ damage
def test_every_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save(
        {"model": {"a.weight": torch.ones(4), "b.weight": torch.full((4,), 2.0)}, "n": [torch.zeros(9)]}, file
    )
    whole = file.read_bytes()
    for name, values in (("model.a.weight", 1.0), ("model.b.weight", 2.0), ("n.0", 0.0)):
        numel = 9 if values == 0 else 4
        begin = whole.find(struct.pack(f"<{numel}f", *[values] * numel))
        for bit in range(0, numel * 32, 13):
            data = bytearray(whole)
            data[begin + bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            assert torch.load(file, weights_only=True)  # which doesn't look
            with pytest.raises(
                DamagedFileError, match=rf"{re.escape(str(file))} is damaged.*{re.escape(repr(name))}"
            ):
                shardkit.load(file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(64)}, file)
    whole = file.read_bytes()
    for length in [*range(0, len(whole), 41), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=re.escape(str(file))):
            shardkit.load(file)


def test_the_format_before_torch_1_6_is_read_on_trust_alone(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UntrustedFileError, match=r"before torch 1\.6.*trust_pickle=True.*weights_only=True"):
        shardkit.load(tmp_path / "a.pt")
    assert shardkit.load(tmp_path / "a.pt", trust_pickle=True)["weight"].tolist() == [1, 1]


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """torch can be told to leave them out."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert shardkit.load(tmp_path / "a.pt")["a"].tolist() == [1, 1]


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigurationError, match="no regular file"):
            shardkit.load(path)


def test_mutated_files_neither_crash_nor_call() -> None:
    """``make fuzz`` reads 10,000 of them."""
    done = file_mutations.run(seed=1000, count=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UntrustedFileError" in done.stdout
    assert "DamagedFileError" in done.stdout
    assert "read" in done.stdout


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


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE:UserWarning")
def test_it_holds_whatever_torchs_default_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable, which torch asks in each load, can turn its own caution off."""
    file, folder = tmp_path / "a.pt", tmp_path / "made"
    torch.save(Calls(folder), file)
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(UntrustedFileError):
            shardkit.load(file)
        assert not folder.exists()
        torch.load(file)
    assert folder.exists()  # of its own torch calls


_GET, _PUT = b"h\x01", b"q\x01"  # of one object that was made before
_TEXT = b"X" + (100_000).to_bytes(4, "little") + b"a" * 100_000
_PATH, _NUMBERS = b"cpathlib\nPosixPath\n", b"(" + b"K\x01" * 60 + b"t"
_PAIRS = b"](" + b"".join(b"M" + k.to_bytes(2, "little") + b"N\x86" for k in range(10_000)) + b"e"
BOMBS = {
    "an index of a gigabyte": b"Nr\xff\xff\xff\x07",
    "a frame of terabytes": b"\x95" + (1 << 60).to_bytes(8, "little") + b"N",
    "a text of gigabytes": b"X\xff\xff\xff\x7fabc",
    "a number of gigabytes": b"\x8b\xff\xff\xff\x7fabc",
    "an array of a terabyte": b"\x96" + (1 << 40).to_bytes(8, "little"),
    "lists in lists": b"]" * 50_000 + b"a" * 49_999,
    "tuples in tuples as a key": b"})" + b"\x85" * 50_000 + b"Ns",
    "a text that doubles": b"X\x01\x00\x00\x00aq\x01" + (_PATH + _GET * 2 + b"\x86Rq\x01") * 40 + _GET,
    "a list that doubles": b"]q\x01" + (b"](" + _GET * 2 + b"eq\x01") * 60 + b"}" + _GET + b"Ns",
    "sizes again and again": _NUMBERS + _PUT + b"](" + (b"ctorch\nSize\n" + _GET + b"\x85R") * 5000 + b"e",
    "bytes again and again": _TEXT + _PUT + b"](" + (b"c_codecs\nencode\n" + _GET + b"\x85R") * 3000 + b"e",
    "dicts again and again": _PAIRS
    + _PUT
    + b"]("
    + (b"ccollections\nOrderedDict\n" + _GET + b"\x85R") * 400
    + b"e",
}


@pytest.mark.parametrize("what", BOMBS)
def test_forged_pickles_take_memory_in_proportion(tmp_path: Path, what: str) -> None:
    """In tables of contents of distributed checkpoints and in files of torch.save."""
    data = b"\x80\x02" + BOMBS[what] + b"."
    (tmp_path / ".metadata").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("archive/data.pkl", data)
    for read in (lambda: read_metadata(tmp_path), lambda: shardkit.load(tmp_path / "a.pt")):
        found, peak = file_mutations.peak_of(read)
        assert peak < file_mutations.bounded(len(data))
        assert isinstance(found, ShardkitError) or not isinstance(found, Exception)


def test_what_is_copied_is_in_the_file(tmp_path: Path) -> None:
    """An element can be expanded to a terabyte; what has to be copied to be made can not."""
    one = torch.ones(1).expand(1 << 38)
    torch.save(one, tmp_path / "a.pt")
    assert shardkit.load(tmp_path / "a.pt").shape == one.shape

    class Sparse:
        def __reduce__(self) -> Any:
            parts = torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 38), one, torch.Size([1])
            return torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (*parts, True))

    class OfXla:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_device_tensor_from_cpu_tensor, (one, torch.float64, "cpu", False)

    for made in (Sparse(), OfXla()):
        torch.save(made, tmp_path / "a.pt")
        with pytest.raises(DamagedFileError, match="repeats what it is made of"):
            shardkit.load(tmp_path / "a.pt")


def test_forged_tables_of_contents(tmp_path: Path) -> None:
    """What a table says of itself is compared; a list of a million holes and a tensor of a terabyte are no data."""

    def table(records: list[Written]) -> TableOfContents:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata_of({"__0_0.distcp": records})))
        return read_metadata(tmp_path)

    whole = Written(("a",), "float32", (8,), ((0,), (8,)), 0, 500, "")
    assert table([whole]).nested({"a": 1}) == {"a": 1}
    forged = {
        "can't lie in 500 bytes": [whole._replace(shape=(1 << 40,), box=((0,), (1 << 40,)))],
        "lies in another record": [whole, whole._replace(path=("b",), offset=499)],
        "leads nowhere": [whole._replace(path=("a",) * 300)],
        "lies nowhere": [whole._replace(offset=-1)],
        "sizes are no tuple": [whole._replace(shape=(1,) * 65, box=((0,) * 65, (1,) * 65))],
    }
    for what, records in forged.items():
        with pytest.raises(DamagedFileError, match=what):
            table(records)
    holes = [whole._replace(path=(f"a{k}", 1 << 20), offset=500 * k) for k in range(50)]
    names = table(holes).paths
    found, peak = file_mutations.peak_of(lambda: read_metadata(tmp_path).nested(dict.fromkeys(names)))
    assert isinstance(found, ValueError)
    with pytest.raises(
        DamagedFileError, match=r"\.metadata makes no sense \(keys of a list"
    ):  # as commands read it
        read_folder(str(tmp_path), trust_pickle=False)
    assert peak < file_mutations.bounded((tmp_path / ".metadata").stat().st_size)
