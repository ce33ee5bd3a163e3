"""Models, optimizers and ranks of kinds of their own: what is kept of them is right, or refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel

import shardkit
from shardkit import (
    FSDP,
    OSS,
    ConfigurationError,
    OffloadPolicy,
    PrecisionPolicy,
    ReshardPolicy,
    ShardedDDP,
    fully_shard,
)
from shardkit.backend import Group
from shardkit.checkpoint import collecting
from shardkit.errors import DamagedFileError, LifecycleError, UntrustedFileError
from tests.file_mutations import peak_of
from tests.fsdp_models import WIDTH, Tied, Transposed, Unused
from tests.pools import on_ranks, rank_pool
from tests.training_checkpoints.programs import Place, assert_same, build, content, step


def _train(model: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for k in range(steps):
        torch.manual_seed(k)
        optimizer.zero_grad()
        model(torch.randn(3, WIDTH)).square().mean().backward()
        optimizer.step()


def _wrapped(make: Callable[[], nn.Module], seed: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model: Any = make()
    for name, child in list(model.named_children()):
        if not isinstance(child, Transposed):  # another unit's weight
            setattr(model, name, FSDP(child, **options))
    model = FSDP(model, **options)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _kinds(rank: int, folder: str) -> None:
    """Whatever is particular to a kind, what is restored is what was saved, and the next step is the same."""
    kinds: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "tied across units": (Tied, {}),
        "parameters that are never used": (Unused, {}),
        "on the host": (Unused, {"offload": OffloadPolicy(parameters=True)}),
        "half precision": (Tied, {"precision": PrecisionPolicy(compute=torch.bfloat16)}),
        "kept gathered": (Unused, {"reshard": ReshardPolicy(after_forward=False)}),
        "not flat": (Unused, {"flatten": False}),
        "one unit": (lambda: nn.Sequential(Unused()), {}),
    }
    for k, (make, options) in enumerate(kinds.values()):
        model, optimizer = _wrapped(make, 0, **options)
        _train(model, optimizer)
        shardkit.save(f"{folder}/{k}", model=model, optimizer=optimizer, step=1)
        other, its = _wrapped(make, 1, **options)
        _train(other, its, 1)
        shardkit.restore(f"{folder}/{k}", model=other, optimizer=its)
        for _ in range(2):
            torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
            _train(model, optimizer, 1)
            _train(other, its, 1)


def test_kinds_of_models(tmp_path: Path) -> None:
    rank_pool(2).run(_kinds, str(tmp_path))
    for k, make in enumerate([Tied, Unused]):  # one process goes on
        model = make()
        shardkit.restore(tmp_path / str(k), model=model)
        wanted = content(tmp_path / str(k))["model"]
        torch.testing.assert_close(dict(model.state_dict()), wanted, rtol=0, atol=0)


class _Last(nn.Module):
    """Of one flat parameter, what lies on the last rank has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.a(x)
        return found


def _lacking(rank: int, folder: str) -> bool:
    torch.manual_seed(0)
    model = FSDP(_Last())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _train(model, optimizer)
    shardkit.save(folder, model=model, optimizer=optimizer, step=1)
    return bool(optimizer.state)


def test_state_that_some_ranks_lack(tmp_path: Path) -> None:
    rank_pool(4).run(_lacking, str(tmp_path))
    state = content(tmp_path)["optimizer"]["state"]
    assert state["a.weight"]["exp_avg"].abs().min() > 0
    for found in state.values():
        assert set(found) == {"step", "exp_avg", "exp_avg_sq"}


def _counted(rank: int, folder: str) -> tuple[list[str], list[str]]:
    model, optimizer = build("fully_shard")
    step(model, optimizer, 0)
    calls: list[str] = []
    group = shardkit.backend.get_backend("gloo").group(None)  # type: ignore[attr-defined]
    kind: Any = type(group)
    real = {
        name: getattr(kind, name) for name in Group.__abstractmethods__ - {"channel", "abort", "new_group"}
    }
    for name, method in real.items():

        def counted(self: Any, *args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            calls.append(_name)
            return _method(self, *args, **options)

        setattr(kind, name, counted)
    try:
        shardkit.save(f"{folder}/a", model=model, optimizer=optimizer, step=1)
        inside = [c for c in calls if c == "all_gather_bytes"]
        assert set(calls) <= {"all_gather_bytes", "_all_gather", "agree"}
        calls.clear()
        shardkit.save(f"{folder}/b", model=model, optimizer=optimizer, step=1, async_=True).wait()
        return inside, [c for c in calls if c == "all_gather_bytes"]
    finally:
        for name, method in real.items():
            setattr(kind, name, method)


def test_ranks_meet_three_times(tmp_path: Path) -> None:
    """However many parameters there are, and once only where values are written in the background."""
    for at_once, in_background in rank_pool(2).run(_counted, str(tmp_path)):
        assert len(at_once) == 3
        assert len(in_background) == 1


def _simulated(rank: int, folder: str, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizer: Any
    if kind == "oss":
        optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        model = ShardedDDP(model, optimizer)
    else:
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    _train(model, optimizer)
    for k in range(2):
        shardkit.save(f"{folder}/{kind}", model=model, optimizer=optimizer, step=k, async_=bool(k)).wait()
    wanted = {k: v.clone() for k, v in model.state_dict().items()} if kind == "oss" else None
    _train(model, optimizer)
    shardkit.restore(f"{folder}/{kind}", model=model, optimizer=optimizer)
    if wanted is not None:
        torch.testing.assert_close(model.state_dict(), wanted, rtol=0, atol=0)
    shardkit.save(f"{folder}/{kind}-again", model=model, optimizer=optimizer, step=2)


def test_simulated_ranks(tmp_path: Path) -> None:
    for kind in ("oss", "fully_shard"):
        rank_pool(3, "simulated").run(_simulated, str(tmp_path), kind)
        assert_same(content(tmp_path / f"{kind}-again"), content(tmp_path / kind))
    assert_same(content(tmp_path / "oss"), content(tmp_path / "fully_shard"), exact=False)


def _torchs(rank: int, folder: str) -> None:
    """torch's own functions load what shardkit has saved into FSDP2, the optimizer too."""
    model, optimizer = build("fsdp2", seed=1)
    step(model, optimizer, 7)
    state, its = get_state_dict(model, optimizer)
    path = shardkit.latest(f"{folder}/a")
    dcp.load({"model": state, "optimizer": its}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=its)
    shardkit.save(f"{folder}/b", model=model, optimizer=optimizer, step=1)


def _written(rank: int, folder: str, kind: str) -> None:
    model, optimizer = build(kind)
    step(model, optimizer, 0)
    shardkit.save(folder, model=model, optimizer=optimizer, step=1)


def test_torch_loads_it(tmp_path: Path) -> None:
    rank_pool(3).run(_written, str(tmp_path / "a"), "fully_shard")
    rank_pool(2).run(_torchs, str(tmp_path))
    assert_same(content(tmp_path / "b"), content(tmp_path / "a"))


# ------------------------------------------------------------ what is a rank's own
class _Divides(Place):
    def load_rank_states(self, states: Any) -> None:
        self.state = [s["at"] for s in states]


def _drawn() -> list[float]:
    import numpy

    return [random.random(), torch.rand(()).item(), float(numpy.random.rand())]


def _own(rank: int, folder: str) -> list[list[float]]:
    import numpy

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (random.seed, torch.manual_seed, numpy.random.seed):
        seed(rank)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    schedule.step()
    extra = {"notes": [1, ("a", {2: 3})], "ema": {"x": {"y": torch.arange(3.0)}}, "empty": {}}
    extra["a.b"], extra["a"] = "a word", {"n": "bert", "b": torch.ones(2)}  # is one record
    shardkit.save(
        folder, model=model, optimizer=optimizer, scheduler=schedule, step=3, extra=extra,
        loader=Place({"at": rank, "next": (1, torch.ones(2))}),
    )  # fmt: skip
    after, place = _drawn(), Place(None)
    fresh = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters(), lr=0.1), [1, 3])
    found = shardkit.restore(folder, model=model, optimizer=optimizer, scheduler=fresh, loader=place)
    again = _drawn()
    assert fresh.state_dict() == schedule.state_dict()
    assert found.extra["notes"] == extra["notes"]
    assert found.extra["empty"] == {}
    assert found.extra["a.b"] == "a word"
    assert found.extra["a"]["n"] == "bert"  # type: ignore[index]
    assert found.extra["ema"]["x"]["y"].tolist() == [0, 1, 2]  # type: ignore[index]
    assert place.state["at"] == rank
    return [after, again]


def _others(rank: int, folder: str) -> list[float]:
    model = nn.Linear(2, 2)
    divides = _Divides(None)
    shardkit.restore(folder, model=model, loader=divides, random_states=True)
    drawn = _drawn()
    assert divides.state == [0, 1]
    with pytest.raises(ConfigurationError, match="Place has no load_rank_states"):
        shardkit.restore(folder, model=model, loader=Place(None))
    return drawn


def test_what_is_a_ranks_own(tmp_path: Path) -> None:
    drawn = rank_pool(2).run(_own, str(tmp_path))
    assert [after for after, _ in drawn] == [again for _, again in drawn]
    firsts = [after for after, _ in drawn]
    assert rank_pool(3).run(_others, str(tmp_path)) == [firsts[0], firsts[1], firsts[0]]


def test_loaders_that_are_alike_go_to_all(tmp_path: Path) -> None:
    rank_pool(2).run(_alike, str(tmp_path))
    place = Place(None)
    shardkit.restore(tmp_path, model=nn.Linear(2, 2), loader=place)
    assert place.state == {"samples": 8}


def _alike(rank: int, folder: str) -> None:
    shardkit.save(folder, model=nn.Linear(2, 2), step=1, loader=Place({"samples": 8}))


# ------------------------------------------------------------ refusals
@on_ranks(4)
def test_parts_of_the_ranks(rank: int, tmp_path: Path) -> None:
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    model = FSDP(nn.Linear(4, 4), group=half[rank // 2])
    with pytest.raises(ConfigurationError, match=r"spread over ranks \[\d, \d\].*Pass group="):
        shardkit.save(tmp_path, model=model, step=1)
    own = f"{tmp_path}/{rank // 2}"
    shardkit.save(own, model=model, step=1, group=half[rank // 2])
    assert shardkit.restore(own, model=model, group=half[rank // 2]).world_size == 2


class _Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.ones(2)


@on_ranks(2)
def test_what_is_refused(rank: int, tmp_path: Path) -> None:
    model = FSDP(nn.Linear(4, 4))
    optimizer = _Odd(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"'rows' of the shard of weight.*WholeParameters"):
        shardkit.save(tmp_path, model=model, optimizer=optimizer, step=1)
    with model.summon_full_params(), pytest.raises(LifecycleError, match="summoned"):
        shardkit.save(tmp_path, model=model, step=1)
    with pytest.raises(ConfigurationError, match="none of the model's"):
        shardkit.save(tmp_path, model=nn.Linear(4, 4), optimizer=optimizer, step=1)
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        shardkit.restore(tmp_path, model=model)
    shardkit.save(tmp_path, model=model, step=1)
    with pytest.raises(ConfigurationError, match="saved without optimizer="):
        shardkit.restore(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="saved without scheduler="):
        shardkit.restore(tmp_path, model=model, scheduler=Place(None))
    with pytest.raises(
        ConfigurationError, match=r"not in the checkpoint are 0\.bias.*not in the model are bias"
    ):
        shardkit.restore(tmp_path, model=nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(
        ConfigurationError, match=r"'model.weight' has shape \(4, 4\) in .* and \(4, 5\) here"
    ):
        shardkit.restore(tmp_path, model=FSDP(nn.Linear(5, 4)))
    shardkit.save(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()), step=2)
    with pytest.raises(ConfigurationError, match=r"has options amsgrad, betas.*another class of optimizer"):
        shardkit.restore(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="saved without ema="):
        shardkit.restore(tmp_path, ema=model)


def test_numbers_that_one_shard_can_not_have(tmp_path: Path) -> None:
    """Two parameters that were updated in different numbers of steps, and lie in one flat parameter when restored."""
    model = Unused()
    optimizer = torch.optim.Adam(model.parameters())
    _train(model, optimizer)
    model.c.bias.grad = None
    for p in model.parameters():
        if p is not model.c.bias and p.grad is not None:
            p.grad.zero_()
    optimizer.step()
    shardkit.save(tmp_path, model=model, optimizer=optimizer, step=3)
    rank_pool(2).run(_different_steps, str(tmp_path))


def _different_steps(rank: int, folder: str) -> None:
    model = FSDP(Unused())
    with pytest.raises(ConfigurationError, match=r"'step' is 3\.0 for 'a\.weight' and 2\.0 for 'c\.bias'"):
        shardkit.restore(folder, model=model, optimizer=torch.optim.Adam(model.parameters()))
    model = fully_shard(Unused())
    shardkit.restore(folder, model=model, optimizer=torch.optim.Adam(model.parameters()))


@on_ranks(2)
def test_an_average_that_nobody_has_used_yet(rank: int, tmp_path: Path) -> None:
    model = fully_shard(Unused())
    before, parts = model.state_dict(), {"model": model, "ema": copy.deepcopy(model)}
    shardkit.save(tmp_path, step=1, **parts)
    for part in parts.values():
        part.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    shardkit.restore(tmp_path, **parts)
    for part in parts.values():
        torch.testing.assert_close(dict(part.state_dict()), dict(before), rtol=0, atol=0)


def test_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers with state of no parameter's shape, large tensors in small records, and strangers' files."""
    monkeypatch.setattr(collecting, "LARGEST", 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, history_size=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(5)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    shardkit.save(tmp_path, model=model, optimizer=optimizer, step=1)
    other = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    its = torch.optim.LBFGS(other.parameters(), lr=0.3, history_size=3)
    shardkit.restore(tmp_path, model=other, optimizer=its)
    optimizer.step(closure)
    model, optimizer, wanted = other, its, model.state_dict()
    optimizer.step(closure)
    torch.testing.assert_close(model.state_dict(), wanted, rtol=0, atol=0)
    path = tmp_path / "step-00000001" / ".metadata"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UntrustedFileError, match=r"os\.system.*would run what it says"):
        shardkit.restore(tmp_path, model=model, verify=False)
    path.write_bytes(b"\x80\x04Nr\xff\xff\xff\x07.")  # nine bytes, for which an array of a gigabyte was made
    refused, peak = peak_of(lambda: shardkit.restore(tmp_path, model=model, verify=False))
    assert isinstance(refused, DamagedFileError)
    assert peak < 1 << 20
    with pytest.raises(ConfigurationError, match="takes an object and a path"):
        shardkit.save(model)  # type: ignore[call-overload]
    shardkit.save({"a": 1}, tmp_path / "a.pt")
    assert shardkit.load(tmp_path / "a.pt") == {"a": 1}


@pytest.mark.parametrize("writer", ["oss", "ddp", "plain", "fsdp"])
@on_ranks(2)
def test_an_average_of_what_is_wrapped_otherwise(rank: int, writer: str, tmp_path: Path) -> None:
    """Its names are the model's, whatever it was made over."""
    model, ema = build(writer, 1)[0], AveragedModel(build(writer, 2)[0])
    shardkit.save_training(tmp_path, step=1, model=model, ema=ema)
    truth = AveragedModel(build("plain", 2)[0]).state_dict()
    for reader in ("plain", "oss", "ddp", "fsdp", "fully_shard", "dtensors"):
        ema = AveragedModel(build(reader, 3)[0])
        shardkit.restore_training(tmp_path, model=build(reader, 3)[0], ema=ema)
        shardkit.save_training(tmp_path / reader, step=1, ema=ema)
        ema = AveragedModel(build("plain", 3)[0])
        shardkit.restore_training(tmp_path / reader, ema=ema)
        torch.testing.assert_close(ema.state_dict(), truth, rtol=0, atol=0)
