"""Weights that leave a sharded model: beside its state dict, and beside a receiver that gets only what has changed."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import (
    FSDP,
    Change,
    ConfigurationError,
    FileNotWrittenError,
    RankFailedError,
    ReshardPolicy,
    SentWeights,
    fully_shard,
    hybrid_groups,
    save_weights,
    sharding_of,
)
from shardkit.checkpoint.tools.hugging_face import read_safetensors, read_weights
from shardkit.fsdp.sharded_api import checksum
from tests.figures.counters import Memory, memory_of
from tests.fsdp.test_pieces import Model, Wrap, by_wrappers, in_place
from tests.pools import DEVICE, on_ranks, rank_pool

needs_libraries = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs transformers and peft (extra: libraries)"
)


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(map(str, sorted(found))) == sorted(expected)
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=0)


def _whole(rank: int, wrap: Wrap, options: dict[str, Any]) -> None:
    if options.pop("replicated", False):
        options["group"], options["replicas"] = hybrid_groups(2)
    model = wrap(Model(), **options)
    sharding, expected = sharding_of(model), dict(Model().state_dict())
    _equal(dict(sharding.export()), expected)
    half = dict(sharding.export(dtype=torch.bfloat16, on=1))
    if rank == 1:
        params = {name for name, _ in Model().named_parameters(remove_duplicate=False)}
        _equal(half, {n: v.bfloat16() if n in params else v for n, v in expected.items()})
    else:
        assert half == {}
    sent = dict(sharding.export(lambda name: f"model.{name}" if "frozen" not in name else None))
    assert sorted(sent) == sorted(f"model.{name}" for name in expected if "frozen" not in name)
    for bad, word in (
        ({"dtype": torch.int8}, "floating"),
        ({"on": 9}, "ranks 0 to"),
        ({"names": "hf"}, "transformers"),
    ):
        with pytest.raises(ConfigurationError, match=word):
            sharding.export(**bad)
    got: list[tuple[str, torch.Tensor]] = []
    assert not list(sharding.export(on=1, to=lambda *each: got.append(each)))
    _equal(dict(got), expected if rank == 1 else {})
    if model.training:
        model.inner(torch.rand(2, 3, 4))  # it is whole again


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_weights_come_under_their_names(world_size: int) -> None:
    pool = rank_pool(world_size)
    for wrap, options in ((by_wrappers, {}), (in_place, {}), (in_place, {"dtensors": True})):
        pool.run(_whole, wrap, options) if world_size > 1 else None
    pool.run(_only_one, in_place) if world_size == 1 else None


def _memory(rank: int) -> Memory:
    def build() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    def step(model: nn.Module, _: int) -> None:
        for _, weights in sharding_of(model).export():
            del weights

    return memory_of(build, step)


def test_memory_is_that_of_a_unit() -> None:
    """Gathered, and what is handed on; at times a thread of gloo has the one before for a moment still."""
    if DEVICE["name"] == "streams":
        pytest.skip("ranks are threads there, whose memory is counted together")
    for runs in zip(*(rank_pool(2).run(_memory) for _ in range(4)), strict=True):
        assert min(memory.peak - memory.resident for memory in runs) <= 2.1 * 256 * 257 * 4


class Deep(nn.Sequential):
    """Three blocks of odd sizes, of two dtypes, and a head that no rank's share divides."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        blocks = [nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 7)) for _ in range(3)]
        super().__init__(*blocks, nn.Linear(7, 5))
        self[1].bfloat16()


@on_ranks(2, 3)
def test_a_receiver_is_handed_a_unit_at_a_time(rank: int) -> None:
    world_size, expected = torch.distributed.get_world_size(), dict(Deep().state_dict())
    model = Deep()
    for block in list(model)[:3]:
        fully_shard(block)
    sharding, alive, got = sharding_of(fully_shard(model)), [], []

    def receive(name: str, weights: torch.Tensor) -> None:
        alive.append(weakref.ref(weights))
        got.append((name, weights.clone(), sum(each().nbytes for each in alive if each() is not None)))

    sharding.export(on=0, to=receive)
    _equal({name: weights for name, weights, _ in got}, expected if rank == 0 else {})
    unit = sum(p.nbytes for p in Deep()[0].parameters())
    assert all(size <= unit or name.endswith(("mean", "var", "tracked")) for name, _, size in got)

    def fail(name: str, weights: torch.Tensor) -> None:
        if rank == world_size - 1 and name == "1.0.bias":
            raise KeyError(name)
        got.append((name, weights, 0))

    for options in ({}, {"on": world_size - 1}, {"since": SentWeights()}):
        got.clear()
        with pytest.raises(KeyError if rank == world_size - 1 else RankFailedError, match=r"1\.0\.bias"):
            sharding.export(to=fail, **options)
        assert not [name for name, _, _ in got if name.startswith("2")]  # nobody goes on
    _equal(dict(sharding.export()), expected)


def _files(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: v for file in path.glob("*.safetensors") for name, v in load_file(file).items()}


@on_ranks(2, 3)
def test_weights_on_the_disk(rank: int, tmp_path: Path) -> None:
    expected = dict(Deep().state_dict())
    model = Deep()
    for block in list(model)[:3]:
        fully_shard(block)
    fully_shard(model)
    one, several = tmp_path / "one", tmp_path / "several"
    save_weights(model, one, lambda name: f"model.{name}")
    save_weights(model, several, dtype=torch.float16, max_shard_size=1000)
    if rank == 0:
        assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "several"]
        _equal(_files(one), {f"model.{name}": v for name, v in expected.items()})
        params = {name for name, _ in Deep().named_parameters()}
        half = {n: v.half() if n in params else v for n, v in expected.items()}
        _equal(_files(several), half)
        _equal({n: v.read() for n, v in read_weights(str(several)).items()}, half)
        index = json.loads((several / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in half.values())
        assert sorted(p.name for p in several.glob("*.safetensors")) == sorted(
            {*index["weight_map"].values()}
        )
        for name, file in index["weight_map"].items():
            assert name in read_safetensors(str(several / file))
    first = rank == 0
    with pytest.raises(ConfigurationError if first else RankFailedError, match="is there already"):
        save_weights(model, one)
    with pytest.raises(FileNotWrittenError if first else RankFailedError, match="No such file"):
        save_weights(model, tmp_path / "no" / "folder")
    with pytest.raises(ConfigurationError if first else RankFailedError, match="can't hold"):
        save_weights(fully_shard(nn.Linear(3, 2, dtype=torch.complex128)), tmp_path / "complex")
    for size in ("5GB", 0):
        with pytest.raises(ConfigurationError, match="max_shard_size"):
            save_weights(model, tmp_path / "sizes", max_shard_size=size)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError if first else RankFailedError, match="max_shard_size"):
        save_weights(model, tmp_path / "sizes", max_shard_size=-1 if first else 10)
    assert rank or sorted(p.name for p in tmp_path.iterdir()) == ["one", "several"]


@on_ranks(2)
def test_weights_are_one_file_whatever_they_are(rank: int, tmp_path: Path) -> None:
    """Many small ones, and counters of 8 bytes behind statistics of 12."""
    parts = [nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.BatchNorm1d(3)) for _ in range(90)]
    model = nn.Sequential(*parts)
    expected = {n: v.clone() for n, v in model.state_dict().items()}
    for part in parts:
        fully_shard(part)
    save_weights(fully_shard(model), tmp_path / "weights")
    if rank == 0:
        assert [p.name for p in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
        _equal(_files(tmp_path / "weights"), expected)


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@on_ranks(2)
def test_modules_that_are_shared_and_what_has_no_changes(rank: int) -> None:
    model, expected = Shared(), dict(Shared().state_dict())
    fully_shard(model.one)
    sharding = sharding_of(fully_shard(model))
    assert sorted(name for name, _ in sharding.export()) == sorted(expected)
    assert sorted(name for name, _ in sharding.export(since=SentWeights())) == sorted(expected)
    with sharding.summon_full_params():
        assert sorted(name for name, _ in sharding.export()) == sorted(expected)  # each once
        with pytest.raises(ConfigurationError, match="leave out since="):
            sharding.export(since=SentWeights())
    with pytest.raises(ConfigurationError, match="16 bytes an element"):
        sharding_of(fully_shard(nn.Linear(2, 2, dtype=torch.complex128))).export(since=SentWeights())


def _only_one(rank: int, wrap: Wrap) -> None:
    model = wrap(Model())
    _equal(dict(sharding_of(model).export(on=0)), dict(Model().state_dict()))
    _receive(rank, wrap, 3, {})


def test_of_replicas_one_sends() -> None:
    rank_pool(4).run(_whole, by_wrappers, {"replicated": True})


class Engine:
    """Takes weights as a worker of vLLM 0.33 does, which is told names, dtypes and shapes before anything arrives."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def update_weights(self, told: str, arriving: list[torch.Tensor]) -> None:
        """Cuts bytes of whole tensors, or takes places of int32 and values of each."""
        info = json.loads(told)
        for k, name in enumerate(info["names"]):
            dtype, shape = getattr(torch, info["dtype_names"][k]), info["shapes"][k]
            if "num_updates_list" not in info:
                nbytes = math.prod(shape) * dtype.itemsize
                self.weights[name] = arriving[0][:nbytes].view(dtype).view(shape).clone()
                arriving[0] = arriving[0][nbytes:]
                arriving[:] = arriving if len(arriving[0]) else arriving[1:]
                continue
            places, values = arriving.pop(0), arriving.pop(0)
            assert (places.dtype, values.dtype) == (torch.int32, dtype)
            assert len(places.unique()) == len(values) == info["num_updates_list"][k]
            self.weights[name].view(-1)[places] = values
        assert not arriving


def _told(weights: list[tuple[str, Any]], **more: list[int]) -> str:
    """Returns what vLLM's trainer tells before it sends."""
    dtypes = [str(w.dtype).split(".")[-1] for _, w in weights]
    shapes = [list(w.shape) for _, w in weights]
    return json.dumps({"names": [n for n, _ in weights], "dtype_names": dtypes, "shapes": shapes, **more})


def _packed(weights: Iterable[tuple[str, Any]], most: int) -> Iterator[torch.Tensor]:
    """Yields buffers of bytes, each sent once it has more than so many."""
    held: list[torch.Tensor] = []
    for _, weight in weights:
        held.append(weight.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, held)) > most:
            yield torch.cat(held)
            held = []
    yield from [torch.cat(held)] if held else []


def _receive(rank: int, wrap: Wrap, steps: int, options: dict[str, Any]) -> None:
    """A receiver beside a training in bf16 with a small learning rate, as reinforcement learning has it."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(37, 41), nn.GELU(), nn.Linear(41, 1001), nn.Linear(1001, 5))
    plain[1].register_buffer("seen", torch.zeros(()))
    start = {n: v.clone() for n, v in plain.state_dict().items()}
    model = (fully_shard if wrap is in_place else FSDP)(plain, **options)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    sent, weights, sizes, engine = SentWeights(), {}, [], Engine()
    told, source = (
        sharding_of(model).export(lambda n: n if "seen" not in n else None, torch.bfloat16) for _ in range(2)
    )
    engine.update_weights(_told(list(told)), list(_packed(source, 5000)))
    whole = sum(v.numel() * 2 for v in start.values())
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        model(torch.rand(4, 37)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        size, patches = 0, []
        for name, change in sharding_of(model).export(dtype=torch.bfloat16, on=0, since=sent):
            if isinstance(change, Change):
                received = pickle.loads(pickle.dumps(change))
                size += received.nbytes
                if step == 0:
                    weights[name] = torch.zeros(received.shape, dtype=received.dtype)
                received.apply(weights[name])
                patches.append((name, received))
        pairs = [change.elements() for _, change in patches]
        counts = [len(places) for places, _ in pairs]
        engine.update_weights(_told(patches, num_updates_list=counts), list(chain(*pairs)))
        sizes.append(size)
        if 8 <= step < steps - 1:
            continue  # checksums say so
        now = {n: v.bfloat16() for n, v in sharding_of(model).export() if "seen" not in n}
        if rank == 0:
            torch.testing.assert_close(weights, now, rtol=0, atol=0)
            torch.testing.assert_close(engine.weights, now, rtol=0, atol=0)
    if rank == 0:
        assert sizes[0] == whole - 2  # without the buffer
        assert max(sizes[1:]) <= 0.06 * whole
        change = Change(torch.Size([3]), torch.float32, (), checksum(torch.ones(3)))
        with pytest.raises(ConfigurationError, match="does not have what was sent"):
            change.apply(torch.tensor([1.0, 1.0, 1.0 + 2**-23]))
        with pytest.raises(ConfigurationError, match="was applied to one"):
            change.apply(torch.ones(4))


def test_what_has_changed_is_sent_to_the_bit() -> None:
    pool = rank_pool(3)
    pool.run(_receive, in_place, 200, {})
    pool.run(_receive, in_place, 3, {"dtensors": True})
    pool.run(_receive, by_wrappers, 3, {})


@on_ranks(2, 4)
def test_gaps_and_borders(rank: int) -> None:
    """Changes far apart, next to each other, at borders of ranks, and so many that all is less."""
    model = fully_shard(nn.Linear(1, 4099, bias=False))
    sent, weights = SentWeights(), torch.zeros(4099, 1)
    for k, at in enumerate(([], [0], [4098], [0, 255, 256, 511, 2000, 2001, 4098], range(0, 4099, 2), [7])):
        with torch.no_grad(), sharding_of(model).summon_full_params():
            for place in at:
                model.weight[place] += 1 + k
            expected = model.weight.detach().clone()
        ((_, change),) = sharding_of(model).export(since=sent)
        assert isinstance(change, Change)
        change.apply(weights)
        assert torch.equal(weights, expected)
        if k == 3:
            assert change.nbytes <= (7 + 4099 // 255 + 1) * 5


@needs_libraries
@pytest.mark.parametrize("kind", ["tied", "experts"])
@on_ranks(2)
def test_names_of_transformers(rank: int, tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    if kind == "tied":
        plain: Any = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=8))
        blocks = plain.transformer.h
    else:
        plain = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, num_local_experts=3, max_position_embeddings=8,
            )
        )  # fmt: skip
        blocks = plain.model.layers
    path = tmp_path / f"{kind}{rank}"
    plain.save_pretrained(path)  # by rank 0
    for block in blocks:
        fully_shard(block)
    model = fully_shard(plain)
    exported = {n: v.clone() for n, v in sharding_of(model).export("hf")}
    save_weights(model, tmp_path / f"{kind}{rank}.saved", "hf", max_shard_size=4000)
    if rank == 0:
        plain.config.save_pretrained(path.with_suffix(".saved"))
        again = type(plain).from_pretrained(path.with_suffix(".saved"))
        _equal(dict(again.state_dict()), dict(type(plain).from_pretrained(path).state_dict()))
        _equal(exported, load_file(path / "model.safetensors"))
    changes = sharding_of(model).export("hf", since=SentWeights())
    if kind == "tied":
        assert [n for n, _ in changes] == list(exported)
    else:
        with pytest.raises(ConfigurationError, match="other tensors than the model"):
            list(changes)


@needs_libraries
@pytest.mark.parametrize("options", [{"reshard": ReshardPolicy(frozen="keep")}, {"dtensors": True}])
@on_ranks(2)
def test_merged_adapters_leave_as_one_model(rank: int, options: dict[str, Any]) -> None:
    """LoRA on frozen weights that stay gathered, merged for an inference engine."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=40, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
        )
        return get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    def name(of: str) -> str | None:
        return None if "lora_" in of else of.removeprefix("base_model.model.").replace(".base_layer", "")

    plain, model = make(), make()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    words = torch.arange(16).view(2, 8)
    for each in (plain, model):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(2):
            each(input_ids=words, labels=words).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ConfigurationError, match="adapters"):
        sharding_of(model).export("hf")
    with sharding_of(model).summon_full_params():
        model.merge_adapter()
    plain.merge_adapter()
    found = dict(sharding_of(model).export(name))
    expected = {renamed: v for n, v in plain.state_dict().items() if (renamed := name(n)) is not None}
    assert sorted(found) == sorted(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
