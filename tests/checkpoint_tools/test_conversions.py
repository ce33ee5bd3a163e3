"""Every kind of checkpoint as every other, to the bit, read by those for whom they are."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardkit import load
from shardkit.checkpoint.tools import Conversion, compare, convert, open_checkpoint
from shardkit.checkpoint.tools.hugging_face import SafetensorsFiles
from shardkit.errors import ConfigurationError, DamagedFileError, UntrustedFileError
from tests.checkpoint_tools.samples import Net, assert_same, by_name, everything, make, trained
from tests.pools import on_ranks, rank_pool

SOURCES = ("shardkit", "dcp", "torch", "bare", "fairscale", "xla", "hf")
TARGETS = {"dcp": None, "torch": None, "fairscale": None, "fairscale of ranks": 2, "xla": 3, "hf": None}


def _read(path: str, target: str) -> dict[str, Any]:
    """The model's state dict, by a reader of the target's own."""
    if target == "dcp":
        state = {"model": {k: torch.full_like(v, 3) for k, v in Net().state_dict().items()}}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state["model"]
    if target in ("torch", "fairscale"):
        state = torch.load(path)
        assert_same(_model_of(load(path)), _model_of(state))
        return _model_of(state)
    if target == "hf":
        from safetensors import safe_open

        found: dict[str, Any] = {}
        assert (Path(path) / "model.safetensors.index.json").exists()
        for name in sorted(n for n in os.listdir(path) if n.endswith(".safetensors")):
            with safe_open(os.path.join(path, name), framework="pt") as file:
                found.update({k: file.get_tensor(k) for k in file.keys()})  # noqa: SIM118  (no dict)
                found.update({k: found[v] for k, v in file.metadata().items() if v in found})
        return found
    files = [load(os.path.join(path, name)) for name in sorted(os.listdir(path))]
    if target == "xla":
        from shardkit.xla.fsdp.state_dict_utils import consolidate_sharded_state_dicts

        return consolidate_sharded_state_dicts([f["model"] for f in files], files[0]["shard_metadata"])
    from shardkit.fsdp.state_dict import consolidate

    return consolidate([f["model"] for f in files], [f["shard_metadata"] for f in files])


def _model_of(state: dict[str, Any]) -> dict[str, Any]:
    return state.get("model", state)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: make(kind, tmp_path_factory.mktemp(kind)) for kind in SOURCES}


@pytest.mark.parametrize("source", SOURCES)
def test_all_pairs(source: str, sources: dict[str, str], tmp_path: Path) -> None:
    expected = everything()["model"]
    for target, ranks in TARGETS.items():
        path = str(tmp_path / target.replace(" ", "-"))
        how = Conversion(target.partition(" ")[0], ranks, max_shard_size=300, buffers=(r"norm\.nothing",))
        done = convert(sources[source], path, how)
        assert_same(_read(path, target), expected)
        result = compare(open_checkpoint(sources[source]), open_checkpoint(path), model_only=True)
        assert result.differences == []
        assert result.tensors == len(expected)
        whole = source in ("shardkit", "dcp", "torch")
        said = any(note.startswith("left out") and "optimizer" in note for note in done.notes)
        assert said == (whole and target not in ("dcp", "torch", "fairscale"))


def test_the_rest_goes_along(sources: dict[str, str], tmp_path: Path) -> None:
    """Optimizer, step and what a user put there: to the bit, by name in DCP, by number in OSS's format."""
    state = everything()
    convert(sources["torch"], str(tmp_path / "dcp"), Conversion("dcp"))
    convert(str(tmp_path / "dcp"), str(tmp_path / "back"), Conversion("fairscale"))
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "torchs"))
    named = torch.load(tmp_path / "torchs")
    assert named["step"] == 2
    assert named["extra"] == state["extra"]
    for name, values in by_name(state)["optimizer"]["state"].items():
        assert_same(named["optimizer"]["state"][name], values)
    back = torch.load(tmp_path / "back")
    (group,) = back["optimizer"]["param_groups"]
    assert group.pop("param_names") == [n for n, _ in Net().named_parameters()]
    assert group == state["optimizer"]["param_groups"][0]
    model, optimizer = trained()
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    for k, values in optimizer.state_dict()["state"].items():
        assert_same(values, state["optimizer"]["state"][k])
    manifest = json.loads((tmp_path / "dcp" / "shardkit.json").read_text())
    assert manifest["step"] == 2
    convert(sources["torch"], str(tmp_path / "alone"), Conversion("torch", model_only=True))
    assert_same(torch.load(tmp_path / "alone"), state["model"])


def test_an_optimizer_whose_parameters_are_uncertain_keeps_its_numbers(tmp_path: Path) -> None:
    state = everything()
    of_units = copy.deepcopy(state)  # fairscale's FSDP numbers the root's own parameters first
    of_units["optimizer"]["param_id_map"] = {0: 0, **dict.fromkeys(range(1, 99), 1)}
    state["optimizer"]["param_groups"][0]["params"].append(77)
    for kind in (state, of_units):
        torch.save(kind, tmp_path / "file")
        done = convert(str(tmp_path / "file"), str(tmp_path / "dcp"), Conversion("dcp", overwrite=True))
        assert any("stays by numbers" in note for note in done.notes)


def test_dtypes_are_the_models_alone(sources: dict[str, str], tmp_path: Path) -> None:
    convert(sources["shardkit"], str(tmp_path / "file"), Conversion("torch", dtype=torch.bfloat16))
    found, state = torch.load(tmp_path / "file"), everything()
    expected = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state["model"].items()}
    assert_same(found["model"], expected)
    moment = found["optimizer"]["state"]["hidden.weight"]["exp_avg"]
    assert torch.equal(moment, by_name(state)["optimizer"]["state"]["hidden.weight"]["exp_avg"])


def test_tied_weights_stay_tied(sources: dict[str, str], tmp_path: Path) -> None:
    for kind in ("torch", "hf"):
        convert(sources["torch"], str(tmp_path / kind), Conversion(kind, model_only=True))
    convert(str(tmp_path / "hf"), str(tmp_path / "again"), Conversion("torch"))
    for name in ("torch", "again"):
        found = torch.load(tmp_path / name)
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


def test_weights_are_tied_on_request(sources: dict[str, str], tmp_path: Path) -> None:
    """Each name has a tensor of its own in DCP."""
    pair = ("head.weight", "embedding.weight")
    for kind, ranks in (("torch", None), ("xla", 2), ("fairscale", 2)):
        path = str(tmp_path / f"{kind}{ranks}")
        convert(sources["dcp"], path, Conversion(kind, ranks, tied=(pair,), model_only=True))
        model = open_checkpoint(path).model
        assert model["head.weight"].identity == model["embedding.weight"].identity is not None
        assert_same({k: v.read() for k, v in model.items()}, everything()["model"])
    (pair,) = load(tmp_path / "xla2" / "rank-00000000-of-00000002.pth")["shard_metadata"][
        "shared_info"
    ].items()
    assert pair == ("head.weight", "embedding.weight")
    for wrong, words in (
        (("head.weight", "head.bias"), "no tensor 'head.bias'"),
        (("norm.bias", "norm.weight"), "differ"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            convert(sources["dcp"], str(tmp_path / "x"), Conversion("hf", tied=(wrong,)))


def test_other_programs_keys(tmp_path: Path) -> None:
    """Lightning's, and those of torch's tutorial: one layer around all."""
    state = everything()
    lightning = {"epoch": 1, "state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
    torch.save(lightning, tmp_path / "last.ckpt")
    dcp.save({"app": by_name(state)}, checkpoint_id=str(tmp_path / "app"), no_dist=True)
    for k, name in enumerate(("last.ckpt", "app")):
        done = convert(str(tmp_path / name), str(tmp_path / str(k)), Conversion("dcp"))
        assert any("'app'" in n for n in done.notes) == (name == "app")
        assert any("of model.parameters()" in n for n in done.notes) == (name == "last.ckpt")
        dcp_to_torch_save(str(tmp_path / str(k)), str(tmp_path / "torchs"))
        found = torch.load(tmp_path / "torchs")
        assert_same(found["model"], state["model"])
        for parameter, values in by_name(state)["optimizer"]["state"].items():
            assert_same(found["optimizer"]["state"][parameter], values)


def test_tensors_that_had_to_be_read(tmp_path: Path) -> None:
    """Files of which tensors can't be left where they are, whole ones and shards."""
    path = make("fairscale", tmp_path)
    for file in Path(path).iterdir():
        saved = load(file)
        saved["more"] = torch.eye(3).to_sparse()
        torch.save(saved, file)
    assert_same({k: v.read() for k, v in open_checkpoint(path).model.items()}, everything()["model"])
    model = everything()["model"]
    torch.save({"model": model, "more": _Calls(tmp_path / "made")}, tmp_path / "file")
    with pytest.raises(UntrustedFileError):
        open_checkpoint(str(tmp_path / "file"))
    checkpoint = open_checkpoint(str(tmp_path / "file"), trust_pickle=True)
    convert(checkpoint, str(tmp_path / "out"), Conversion("torch", model_only=True))
    found = torch.load(tmp_path / "out")
    assert_same(found, model)
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


@on_ranks(2)
def test_fsdp2_on_two_ranks(rank: int, tmp_path: Path) -> None:
    """FSDP2 writes rows on two ranks, and reads what was converted."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    plain = {k: v.clone() for k, v in model.state_dict().items()}
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.zero_()  # type: ignore[union-attr]
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{tmp_path}/fsdp2")
    if rank == 0:
        convert(f"{tmp_path}/fsdp2", f"{tmp_path}/torch", Conversion("torch"))
        assert_same(torch.load(f"{tmp_path}/torch")["model"], plain)
        convert(f"{tmp_path}/torch", f"{tmp_path}/back", Conversion("dcp"))
    torch.distributed.barrier()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(9)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{tmp_path}/back")
    model.load_state_dict(state["model"])
    assert_same({k: v.full_tensor() for k, v in model.state_dict().items()}, plain)


def _flat(rank: int, folder: str) -> Any:
    """Files of ranks as programs save them: nested wrappers, flat parameters, aligned ones."""
    from shardkit import FSDP

    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(3, 2)))
    full = {k: v.clone() for k, v in model.state_dict().items()}
    saved = {"weights": model.local_state_dict(), "shard_metadata": model.local_metadata_dict(), "epoch": 3}
    torch.save(saved, f"{folder}/rank-{rank}.pt")
    return full


def test_flat_parameters_of_ranks(tmp_path: Path) -> None:
    full = rank_pool(2).run(_flat, str(tmp_path))[0]
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.kind == "fairscale"
    assert checkpoint.left_out == ["'epoch' in the files of ranks"]
    assert_same({k: v.read() for k, v in checkpoint.model.items()}, full)
    (tmp_path / "rank-1.pt").rename(tmp_path / "rank-1.lost")
    with pytest.raises(ConfigurationError, match=r"files of ranks \[0\]"):
        open_checkpoint(str(tmp_path))


def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    torch.save({"model": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "trained.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    sources = {"trained.pt": str(tmp_path / "base"), "dcp": str(tmp_path / "base"), "base": None}
    for k, (source, files_from) in enumerate(sources.items()):
        path = tmp_path / f"hf{k}"
        done = convert(
            str(tmp_path / source), str(path), Conversion("hf", max_shard_size=5000, files_from=files_from)
        )
        assert any("without 'module.'" in n for n in done.notes) == (source == "trained.pt")
        found, info = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(found.state_dict(), model.state_dict())
    convert(str(tmp_path / "hf0"), str(tmp_path / "half"), Conversion("hf", dtype=torch.bfloat16))
    half = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert_same(half.state_dict(), model.bfloat16().state_dict())


@pytest.mark.parametrize("case", ["names", "long", "tied", "empty", "dtypes"])
def test_tables_of_any_length(case: str, tmp_path: Path) -> None:
    """One file, which safetensors reads, whatever its table takes."""
    from safetensors.torch import load_file

    states: dict[str, dict[str, torch.Tensor]] = {
        "names": {f"layers.{k}.weight": torch.full((3,), float(k)) for k in range(1500)},
        "long": {"a" * 70_000: torch.arange(5.0), "b": torch.arange(3)},
        "tied": dict.fromkeys((f"heads.{k}.weight" for k in range(3000)), torch.arange(7.0)),
        "empty": {**{f"empty.{k}": torch.empty(0, k) for k in range(1500)}, "zuletzt": torch.arange(9.0)},
        "dtypes": {
            f"{k}": torch.arange(3).to([torch.int8, torch.int64, torch.half, torch.float][k % 4]) for k in range(40)
        },
    }  # fmt: skip
    torch.save(states[case], tmp_path / "source.pt")
    convert(str(tmp_path / "source.pt"), str(tmp_path / "hf"), Conversion("hf"))
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    read = {k: v.read() for k, v in open_checkpoint(str(tmp_path / "hf")).model.items()}
    assert_same(read, states[case])
    assert_same(found, {k: states[case][k] for k in found})
    assert len(found) == (1 if case == "tied" else len(states[case]))


def test_what_no_safetensors_file_can_be(tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(3), "weight": torch.ones(2)}, tmp_path / "source.pt")
    cases = {"'__metadata__'": Conversion("hf")}
    cases |= {f"max_shard_size={size!r}": Conversion("hf", max_shard_size=size) for size in ("5GB", 0, -1)}  # type: ignore[arg-type]
    for words, how in cases.items():
        with pytest.raises(ConfigurationError, match=words):
            convert(str(tmp_path / "source.pt"), str(tmp_path / "hf"), how)
        assert os.listdir(tmp_path) == ["source.pt"]
    files = SafetensorsFiles(str(tmp_path), 10**9)
    files.add("weight", torch.float32, (3,), [memoryview(bytes(11))])
    with pytest.raises(DamagedFileError, match="its header says"):  # fewer bytes than were promised
        files.finish()
    assert not list(tmp_path.glob("*.safetensors"))
    (tmp_path / "two").mkdir()
    files = SafetensorsFiles(str(tmp_path / "two"), 4)  # a file for each
    for name in ("weight", "bias"):
        files.add(name, torch.float32, (1,), [memoryview(bytes(4))])
    with pytest.raises(ConfigurationError, match="'weight', which another one"):
        files.add("weight", torch.float32, (1,), [memoryview(bytes(4))])


def test_a_table_that_is_too_long_is_two(tmp_path: Path) -> None:
    """Readers take 100 MB."""
    from safetensors import safe_open

    (tmp_path / "files").mkdir()
    names = [f"{k}." + "w" * 6_000_000 for k in range(18)]
    files = SafetensorsFiles(str(tmp_path / "files"), 10**9, {"tied": names[17]})
    for k, name in enumerate(names):
        files.add(name, torch.int16, (1,), [memoryview(bytes([k, 0]))])
    files.finish()
    found = {n: v.read().item() for n, v in open_checkpoint(str(tmp_path / "files")).model.items()}
    assert found == {**{name: k for k, name in enumerate(names)}, "tied": 17}
    for file, count in (("1", 15), ("2", 3)):
        with safe_open(tmp_path / "files" / f"model-0000{file}-of-00002.safetensors", "pt") as each:
            assert len(each.keys()) == count


@pytest.mark.oracle
def test_fairscale_reads_and_writes_files_of_ranks(sources: dict[str, str], tmp_path: Path) -> None:
    from fairscale.nn import FullyShardedDataParallel as Theirs

    convert(sources["torch"], str(tmp_path / "ranks"), Conversion("fairscale", 3))
    files = [torch.load(p) for p in sorted((tmp_path / "ranks").iterdir())]
    found = Theirs.consolidate_shard_weights(
        [f["model"] for f in files], [f["shard_metadata"] for f in files]
    )
    assert_same(found, everything()["model"])
    expected = rank_pool(2, "fairscale").run(_theirs, str(tmp_path))[0]
    assert_same({k: v.read() for k, v in open_checkpoint(f"{tmp_path}/flat*.pt").model.items()}, expected)


def _theirs(rank: int, folder: str) -> Any:
    """fairscale's own files, and its reading of a converted one."""
    from fairscale.nn import FullyShardedDataParallel as Theirs

    def build(flatten: bool) -> Any:
        torch.manual_seed(3)
        inner = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        options: dict[str, Any] = {"flatten_parameters": flatten, "compute_device": torch.device("cpu")}
        return Theirs(nn.Sequential(Theirs(inner, **options), nn.Linear(3, 2)), **options)

    model = build(True)
    full = {k: v.clone() for k, v in model.state_dict().items()}
    saved = {"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}
    torch.save(saved, f"{folder}/flat{rank}.pt")
    if rank == 0:
        torch.save({k: v + 1 for k, v in full.items()}, f"{folder}/more.pt")
        convert(f"{folder}/more.pt", f"{folder}/cut", Conversion("fairscale", 2))
    torch.distributed.barrier()
    other = build(False)
    other.state_dict()  # fairscale has to be set up before it takes shards
    other.load_local_state_dict(torch.load(f"{folder}/cut/rank-{rank:05d}-of-00002.pt")["model"])
    for name, value in other.state_dict().items():
        assert torch.equal(value, full[name] + 1), name
    return full


def test_what_can_not_be_is_said(sources: dict[str, str], tmp_path: Path) -> None:
    source, there = sources["torch"], tmp_path / "there"
    there.mkdir()
    (there / "letter.txt").write_text("kept")
    cases = [
        (Conversion("dcp"), there, "--overwrite"),
        (Conversion("dcp", overwrite=True), there, "no checkpoint"),
        (Conversion("torch", overwrite=True), there, "no checkpoint"),
        (Conversion("hf", 2), tmp_path / "x", "--ranks 2"),
        (Conversion("xla"), tmp_path / "x", "pass --ranks"),
        (Conversion("xla", 2, buffers=("a(",)), tmp_path / "x", "--buffer"),
        (Conversion("xla", 0), tmp_path / "x", "1 or more"),
        (Conversion("torch", overwrite=True), Path(source), "lie in each other"),
        (Conversion("torch"), tmp_path / "no" / "x", "there is no folder"),
    ]
    for how, path, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            convert(source, str(path), how)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert (there / "letter.txt").read_text() == "kept"
    convert(source, str(tmp_path / "out"), Conversion("dcp"))
    convert(source, str(tmp_path / "out"), Conversion("hf", overwrite=True))
    assert open_checkpoint(str(tmp_path / "out")).kind == "hf"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "there"]


class _Calls:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_forged_files_run_nothing(sources: dict[str, str], tmp_path: Path) -> None:
    import pickle

    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

    folder = tmp_path / "dcp"
    folder.mkdir()
    made = tmp_path / "made"
    forged: list[object] = [_Calls(made), Metadata({"a": BytesStorageMetadata()}, planner_data=_Calls(made))]
    for value in forged:
        (folder / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(UntrustedFileError, match=r"posix\.mkdir"):
            open_checkpoint(str(folder))
    dcp.save({"model": {"a": torch.ones(2)}, "extra": _Calls(made)}, checkpoint_id=str(folder), no_dist=True)
    assert not made.exists() or not made.rmdir()
    with pytest.raises(UntrustedFileError, match="extra"):
        open_checkpoint(str(folder))
    assert not made.exists()
    # instructions that would set attributes of a class that stands for one of torch's
    changes = b"N}X\x03\x00\x00\x00getK\x01s\x86b."
    for name in (b"torch\nSize\n", b"torch.distributed.checkpoint.metadata\nMetadata\n"):
        (folder / ".metadata").write_bytes(b"\x80\x04c" + name + changes)
        with pytest.raises(UntrustedFileError, match="the state of a Function"):
            open_checkpoint(str(folder))
