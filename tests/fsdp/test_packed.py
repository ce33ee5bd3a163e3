"""Frozen weights that stay packed (``ReshardPolicy(frozen="packed")``), beside one process that has what they mean."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardkit
from shardkit import (
    ConfigurationError,
    LifecycleError,
    ReshardPolicy,
    SentWeights,
    fully_shard,
    sharding_of,
    summary,
)
from shardkit.fsdp.originals import Place
from shardkit.fsdp.own_forms import PackedWeight
from tests.doors import DOORS
from tests.figures.counters import OperationCounter
from tests.fsdp.test_frozen import LAYERS, WIDTH, Stack, _loss, _sharded
from tests.pools import rank_pool

# of QLoRA's appendix E
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def _rounded(weight: torch.Tensor, packing: str) -> torch.Tensor:
    """What a weight stands for after it was packed, one row and block after the other."""
    made, size = weight.detach().clone(), 64 if packing == "nf4" else -(-weight.shape[1] // 16) * 16
    for row in made:
        for block in row.split(size):
            largest = block.abs().max()
            if packing == "nf4":
                nearest = (block[:, None] / largest - NF4).abs().argmin(1)
                block.copy_(NF4[nearest] * largest)
            else:
                block.copy_((block / (largest / 127)).round() * (largest / 127))
    return made


def _truth(packing: str, width: int = WIDTH) -> Stack:
    plain = Stack(width=width)
    with torch.no_grad():
        for p in plain.parameters():
            if not p.requires_grad and p.dim() > 1:
                p.copy_(_rounded(p, packing))
    return plain


def _train(models: Any, rank: int, world_size: int, steps: Any) -> None:
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in models]
    for step in steps:
        for k in range(2):
            _loss(models[1], 10 * step + k + 100 * rank).backward()
            for r in range(world_size):
                (_loss(models[0], 10 * step + k + 100 * r) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _summoned(model: nn.Module) -> dict[str, torch.Tensor]:
    with sharding_of(model).summon_full_params():
        return {
            n.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", ""): p.detach().clone()
            for n, p in model.named_parameters()
        }


def _compare(plain: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(_summoned(model), dict(plain.state_dict()), rtol=1e-5, atol=2e-6)


def _right(rank: int, wrap: str, packing: Any, world_size: int) -> None:
    plain = _truth(packing)
    model = _sharded(Stack(), wrap, reshard=ReshardPolicy(frozen="packed", packing=packing))
    _train((plain, model), rank, world_size, range(2))
    _compare(plain, model)
    facts = summary(model).units
    assert sum(unit.parameters for unit in facts) == sum(p.numel() for p in plain.parameters())
    with OperationCounter(world_size) as counter:
        _loss(model, 1).backward()
    rest = sum(p.numel() for p in plain.parameters() if p.shape != (WIDTH, WIDTH))
    packed = (LAYERS + 1) * (WIDTH + 1) * (80 if packing == "int8" else 52)  # a row is one block, and a head
    most = 2 * packed + 4 * 4.2 * rest  # gathered twice; the rest is mostly trained, and reduced
    assert counter.sent <= most * (world_size - 1) / world_size, (counter.sent, most)
    before = _summoned(model)
    with sharding_of(model).summon_full_params():  # written back as it was
        pass
    torch.testing.assert_close(_summoned(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", ["FSDP", "fully_shard", "dtensors"])
def test_packed_weights_are_what_they_stand_for(wrap: str) -> None:
    for world_size, packing in ((2, "int8"), (2, "nf4"), (3, "int8")) if wrap == "FSDP" else ((2, "int8"),):
        rank_pool(world_size).run(_right, wrap, packing, world_size)
    if wrap == "fully_shard":
        rank_pool(1).run(_right, wrap, "nf4", 1)


def _in_other_ways(rank: int) -> None:
    reshard = ReshardPolicy(frozen="packed")
    plain, model = _truth("int8"), _sharded(Stack(), "FSDP", reshard=reshard)
    _train((plain, model), rank, 2, range(1))

    # a full state dict has values; loading packs them again
    state = model.state_dict()
    torch.testing.assert_close(state, plain.state_dict(), rtol=1e-5, atol=2e-6)
    other = {n: v * 1.5 for n, v in Stack().state_dict().items()}
    model.load_state_dict(other)
    plain.load_state_dict(
        {n: _rounded(v, "int8") if v.shape == (WIDTH, WIDTH) else v for n, v in other.items()}
    )
    _train((plain, model), rank, 2, range(1, 2))
    _compare(plain, model)

    # a row that was written is packed again, others stay
    with torch.no_grad(), sharding_of(model).summon_full_params():
        model.layers[0].base.weight[1] = torch.linspace(-1, 1, WIDTH)  # type: ignore[union-attr,operator,index]
    with torch.no_grad():
        plain.layers[0].base.weight[1] = _rounded(torch.linspace(-1, 1, WIDTH)[None], "int8")[0]  # type: ignore[union-attr,index]
    _compare(plain, model)

    # copies, training checkpoints and exports
    torch.testing.assert_close(_loss(copy.deepcopy(model), 3), _loss(plain, 3))
    exported = dict(sharding_of(model).export())
    torch.testing.assert_close(exported, dict(plain.state_dict()), rtol=1e-5, atol=2e-6)
    sent, received = SentWeights(), {n: torch.zeros_like(v) for n, v in exported.items()}
    # what is packed comes once, and again when it was loaded
    for step, whole in enumerate((True, False, True)):
        if step == 2:
            model.load_state_dict(state)
        changes = dict(sharding_of(model).export(on=0, since=sent))
        assert bool(changes) == (rank == 0)
        for name, change in changes.items():
            change.apply(received[name])  # type: ignore[union-attr]
            assert not name.endswith("base.weight") or (change.nbytes > 0) == whole
        exported = dict(sharding_of(model).export())
        assert rank > 0 or all(torch.equal(received[name], value) for name, value in exported.items())
    model.load_state_dict(plain.state_dict())
    folder = sharding_of(model)._state.group.broadcast_object(tempfile.mkdtemp() if rank == 0 else "", 0)
    shardkit.save_training(folder, step=0, model=model)
    again = _sharded(Stack(), "fully_shard", reshard=reshard)
    shardkit.restore_training(folder, model=again)
    _compare(plain, again)

    # in other dtypes; what nobody has changed stays, though it is rounded to bf16 in between
    narrow = _sharded(Stack().bfloat16(), "fully_shard", reshard=reshard)
    before = _summoned(narrow)
    torch.testing.assert_close(_summoned(narrow), before, rtol=0, atol=0)
    half = _sharded(
        Stack(), "fully_shard", reshard=reshard, precision=shardkit.PrecisionPolicy(torch.bfloat16)
    )
    out = _loss(half, 3)
    out.backward()
    assert abs(float(out) - float(_loss(_truth("int8"), 3))) < 0.05
    with sharding_of(half).summon_full_params():
        assert half.layers[0].base.weight.dtype == torch.float32  # type: ignore[union-attr]
        torch.testing.assert_close(_loss(half, 3), out)

    masters = _sharded(Stack(), "fully_shard", reshard=reshard, offload=shardkit.OffloadPolicy(masters=True))
    torch.testing.assert_close(_loss(masters, 3), _loss(_truth("int8"), 3))

    # for good
    with pytest.raises(ConfigurationError, match=r"'base\.weight' was frozen when"):
        half.requires_grad_(True)
    half.requires_grad_(False)
    for wrap in ("FSDP", "fully_shard", "dtensors"):
        for p in _sharded(Stack(), wrap, reshard=reshard).parameters():
            if not p.requires_grad and p.dtype == torch.uint8:
                assert not p.requires_grad_(False).requires_grad
                with pytest.raises(ConfigurationError, match=r"weight' was frozen when"):
                    p.requires_grad_(True)
                with pytest.raises(ConfigurationError, match=r"weight' was frozen when"):
                    p.requires_grad = True
    leaf = model.layers[0].base.weight  # type: ignore[union-attr]
    leaf.requires_grad_(True)  # type: ignore[operator]
    with pytest.raises(ConfigurationError, match=r"'base\.weight' was frozen when"):
        _loss(model, 0)

    # bytes are no numbers
    average = AveragedModel(again, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(again)  # the first one copies
    torch.testing.assert_close(_loss(average, 3), _loss(plain, 3))
    average.update_parameters(again)
    with pytest.raises(LifecycleError, match="computed with its bytes"):
        _loss(average, 3)


class Tied(nn.Module):
    """A frozen table of words that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.stack = nn.Embedding(50, WIDTH), Stack()
        self.words.weight.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight
        self.stack.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs().sum(1) * 10).long() % 50
        return self.head(torch.tanh(self.stack(self.words(words))))  # type: ignore[no-any-return]


def _tied() -> Tied:
    torch.manual_seed(3)
    return Tied()


def _with_others(rank: int, wrap: str, packing: Any, world_size: int, folder: str) -> None:
    """Tied, beside masters on the host, cut unevenly or over replicas; copied, pickled, and through DCP."""
    reshard = ReshardPolicy(frozen="packed", packing=packing, sends_changes=packing == "nf4")
    options: dict[str, Any] = {"reshard": reshard}
    options["offload"] = shardkit.OffloadPolicy(masters=True)
    if world_size == 4 and wrap == "dtensors":
        options["mesh"] = init_device_mesh("cpu", (2, 2))
    elif world_size == 4:
        options["group"], options["replicas"] = shardkit.hybrid_groups(2)

    def make() -> nn.Module:
        model = _tied()
        model.stack = _sharded(model.stack, wrap, **options)  # type: ignore[arg-type, assignment]
        return DOORS[wrap](model, **options)

    plain, model = _tied(), make()
    with torch.no_grad():
        for p in plain.parameters():
            if not p.requires_grad and p.dim() > 1:
                p.copy_(_rounded(p, packing))

    def alike(plain: nn.Module, model: nn.Module) -> None:
        found, expected = dict(sharding_of(model).export()), dict(plain.state_dict())  # under both names
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)

    _train((plain, model), rank, world_size, range(3))
    alike(plain, model)
    pickled = [pickle.loads(pickle.dumps(model))] if world_size == 3 else []  # refused with replicas
    for copied in (copy.deepcopy(model), *pickled):
        trained = copy.deepcopy(plain)
        _train((trained, copied), rank, world_size, range(3, 4))
        alike(trained, copied)
    alike(plain, model)
    if wrap == "dtensors" and world_size == 3:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        again = make()
        with torch.no_grad():
            for p in again.parameters():
                p.zero_() if p.requires_grad else None
        state = get_model_state_dict(again)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(again, state)
        alike(plain, again)


@pytest.mark.parametrize("world_size", [3, 4])
def test_packed_weights_with_ties_masters_replicas_and_copies(world_size: int, tmp_path: Path) -> None:
    for wrap, packing in (("FSDP", "nf4"), ("fully_shard", "int8"), ("dtensors", "nf4")):
        rank_pool(world_size).run(_with_others, wrap, packing, world_size, str(tmp_path))


def test_rows_without_finite_numbers_stay_in_their_blocks() -> None:
    for packing in ("int8", "nf4"):
        weight = nn.Parameter(torch.randn(40, 256), requires_grad=False)
        weight.data[3, 70], weight.data[5, 130] = float("nan"), float("inf")
        packed = PackedWeight(weight, Place(nn.Linear(1, 1), "weight"), 0, packing)
        found = packed.unpack(packed.values, torch.empty(weight.numel())).view(40, 256)
        lost = torch.zeros(40, 256, dtype=torch.bool)
        for row, start in ((3, 64), (5, 128)):
            lost[row, slice(None) if packing == "int8" else slice(start, start + 64)] = True
        assert torch.equal(~found.isfinite(), lost)


class Codes(nn.Parameter):
    """Stands for bitsandbytes' Params4bit."""

    quant_state = "how codes are read"


def _foreign_codes(rank: int) -> None:
    """Codes in a floating dtype (``quant_storage``) travel as they are, and are never cast. Others that are put there
    bring what says how to read them, as peft's ``merge_adapter()`` makes them."""

    def put(layer: Any, bits: torch.Tensor, scale: float) -> None:
        layer.codes = Codes(bits.clone(), requires_grad=False)
        layer.codes.scale = torch.full((2,), scale)

    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        layer: Any = nn.Linear(8, 8)
        bits = torch.arange(256, dtype=torch.uint8).view(dtype)
        put(layer, bits.flip(0), 2.0)
        precision = shardkit.PrecisionPolicy(torch.bfloat16)
        if dtype is torch.float32:
            with pytest.raises(ConfigurationError, match="'codes' is a Codes, whose codes are stored as"):
                fully_shard(layer, precision=precision)
        else:
            fully_shard(layer, precision=precision)
            for keeps in (True, False):
                with sharding_of(layer).summon_full_params(writeback=keeps):
                    put(layer, bits if keeps else bits.flip(0), 3.0 if keeps else 4.0)
            for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                assert torch.equal(each.codes.scale, torch.full((2,), 3.0))
                exported = dict(sharding_of(each).export())
                assert torch.equal(exported["codes"].view(torch.uint8), bits.view(torch.uint8))


def test_packed_weights_are_loaded_saved_and_not_trained() -> None:
    rank_pool(2).run(_in_other_ways)
    for world_size in (1, 2):
        rank_pool(world_size).run(_foreign_codes)
    with pytest.raises(ConfigurationError, match="'int8' or 'nf4'"):
        ReshardPolicy(packing="int3")  # type: ignore[arg-type]
