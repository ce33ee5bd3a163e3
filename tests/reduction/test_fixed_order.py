"""``ReducePolicy(order="fixed")``: a training leaves the same bits on any number of ranks, or is refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import (
    FSDP,
    OSS,
    AdaScale,
    Compression,
    ConfigurationError,
    LifecycleError,
    ReducePolicy,
    ShardedDDP,
    WholeParameters,
    fully_shard,
    hybrid_groups,
    sharding_of,
)
from shardkit.backend import seed_host
from shardkit.backends.simulated import SimulatedBackend
from shardkit.checkpoint.tools import compare, open_checkpoint
from shardkit.errors import RankFailedError
from shardkit.reduction.shard_gradients import clip_by_global_norm
from shardkit.tools.rehearsal import rehearse
from shardkit.training.data import GlobalBatchSampler
from shardkit.wrapping.activations import checkpoint_wrapper
from tests.fsdp_models import WIDTH, Adapted, Recurrent, Tied
from tests.pools import on_ranks, rank_pool, run_once

K = 24


class Routed(nn.Module):
    """Each row goes to one of three layers: some have no rows in a micro-batch, and no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        out, chosen = torch.zeros_like(x), weights.argmax(-1)
        for k, expert in enumerate(self.experts):
            if (chosen == k).any():
                mask = (chosen == k).unsqueeze(-1)
                out = out + mask * weights[..., k : k + 1] * expert(x)
        return out


class Dropped(nn.Module):
    """Leaves out layers at random, and recomputes the others in backward, where there is dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                x = x + checkpoint(layer, x, use_reentrant=False)
        return x


def _compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
    model.compile(backend="aot_eager")
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 13), nn.Dropout(0.2), nn.Tanh(), nn.Linear(13, 5, bias=False)),
    "conv": lambda: nn.Sequential(nn.Conv1d(3, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.Linear(WIDTH, 3)),
    "lstm": lambda: nn.Sequential(nn.Flatten(), Recurrent()),
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True),
    "tied": Tied,
    "routed": Routed,
    "adapted": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()),
    "dropped": lambda: nn.Sequential(Dropped(), nn.Linear(WIDTH, 2)),
    "compiled": _compiled,
    "checkpointed": lambda: nn.Sequential(
        checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, 9), nn.Dropout(0.2), nn.Tanh())), nn.Linear(9, 3)
    ),
}  # fmt: skip
STRATEGIES = ("fsdp", "units", "rows", "sharded_ddp", "dtensors", "whole")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


class Run:
    """A model and its optimizer under a strategy."""

    def __init__(self, family: str, strategy: str, optimizer: str = "adamw", **policy: Any) -> None:
        seed_host(5)
        inner = FAMILIES[family]()
        reduce = ReducePolicy(**{"order": "fixed", "microbatches": K, **policy})
        where: Any = {}
        if strategy == "hybrid":
            where["group"], where["replicas"] = hybrid_groups(2)
        kind, options = OPTIMIZERS[optimizer]
        self.inner, self.optimizer, self.model = inner, None, inner
        if strategy == "sharded_ddp":
            self.optimizer = OSS([p for p in inner.parameters() if p.requires_grad], kind, **options)
            self.model = ShardedDDP(inner, self.optimizer, reduce=reduce)
            return
        if strategy == "fsdp":
            self.model = FSDP(inner, reduce=reduce)
        else:
            whole = [
                m
                for m in inner.children()
                if any(True for _ in m.parameters()) and not isinstance(m, nn.ModuleList) and family != "tied"
            ]
            if strategy == "layers":  # which some ranks leave out
                whole = [
                    m for each in inner.modules() if isinstance(each, nn.ModuleList) for m in each
                ] or whole
            for m in whole if strategy != "rows" else ():
                fully_shard(m, reduce=reduce, dtensors=strategy == "dtensors", **where)
            fully_shard(inner, reduce=reduce, dtensors=strategy == "dtensors", **where)
        if strategy == "whole":
            self.optimizer = WholeParameters(self.model, torch.optim.Muon, lr=0.02)
        else:
            self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], **options)

    def backward(
        self, number: int, factor: float, scale: Callable[[Any], Any] = lambda loss: loss
    ) -> torch.Tensor:
        """One micro-batch's."""
        with shardkit.microbatch(number):
            x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = (self.model(x) - 1).square().mean() * factor
            scale(loss).backward()
        return loss

    def clip(self, norm: float, torchs: bool) -> torch.Tensor:
        if torchs:  # a rank without a gradient takes no part in it
            for p in self.model.parameters():
                assert p.grad is None or p.grad.detach().shape == p.shape  # torch 2.9 compares classes there
            # torch's own, where importing torch_xla has put another one in its place; every call goes through a mode
            with torch.device("cpu"):
                return torch.nn.utils.clip_grad.clip_grad_norm_(self.model.parameters(), norm)
        if isinstance(self.optimizer, OSS):
            return self.optimizer.clip_grad_norm(norm)
        return sharding_of(self.model).clip_grad_norm_(norm)

    def digest(self) -> str:
        """Of all weights."""
        if isinstance(self.model, ShardedDDP):
            values = self.model.module.state_dict()
        else:
            with sharding_of(self.model).summon_full_params():
                values = {k: v.clone() for k, v in self.model.state_dict().items()}
        whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in values.values()]
        return hashlib.sha1(b"".join(v.detach().numpy().tobytes() for v in whole)).hexdigest()


def train(
    rank: int, world: int, family: str, strategy: str, optimizer: str = "adamw", clip: float = 0.0,
    torchs: bool = False, uneven: bool = False, first: int = 0, last: int = 3, folder: str = "", count: int = K,
    **policy: Any,
) -> list[object]:  # fmt: skip
    """Losses and norms of steps, and a digest of what is left; with a folder, from and to a checkpoint in it."""
    run = Run(family, strategy, optimizer, microbatches=count, **policy)
    if folder and any(Path(folder).iterdir()):
        shardkit.restore_training(folder, model=run.model, optimizer=run.optimizer)
    told: list[object] = []
    for step in range(first, last):
        with shardkit.uneven(run.model) if uneven else contextlib.nullcontext():
            losses = [run.backward(step * count + k, 1 + k % 3) for k in range(rank, count, world)]
        told.append(shardkit.mean_loss(losses).item())
        if clip:
            told.append(run.clip(clip, torchs).item())
        run.optimizer.step()
        run.model.zero_grad()
        run.optimizer.zero_grad()
    if folder:
        shardkit.save_training(folder, model=run.model, optimizer=run.optimizer, step=last)
    return [*told, run.digest()]


def _ranks(world: int, backend: str, *args: Any, **options: Any) -> list[object]:
    """What they leave, which is the same on all of them."""
    each = rank_pool(world, backend).run(_trained, world, args, options)
    assert all(one == each[0] for one in each)
    return each[0]


def _trained(rank: int, world: int, args: tuple[Any, ...], options: dict[str, Any]) -> list[object]:
    return train(rank, world, *args, **options)


def _twenty_steps(family: str, strategy: str, world: int, optimizer: str) -> list[object]:
    """Of 12 micro-batches each; clipping and the dtype on the wire are a family's."""
    number = sorted(FAMILIES).index(family)
    options: dict[str, Any] = {"optimizer": optimizer, "count": 12, "last": 20, "uneven": 12 % world > 0}
    options |= {"clip": (0.3, 0.0, 100.0)[number % 3], "dtype": torch.bfloat16 if number % 4 == 3 else None}
    options["torchs"] = world % 2 > 0 and strategy != "sharded_ddp"  # of several ranks one may own nothing
    if strategy != "dtensors":
        return _ranks(world, "simulated", family, strategy, **options)
    report = rehearse(
        lambda rank: train(rank, world, family, strategy, **options), world, memory=False, show=()
    )
    assert report.is_good, str(report)
    assert all(one == report.results[0] for one in report.results)
    return cast("list[object]", report.results[0])


WORLDS = (2, 3, 4, 6, 8)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_twenty_steps(family: str) -> None:
    """Each family by three strategies, each on another number of ranks; all families together by all on all."""
    number = sorted(FAMILIES).index(family)
    optimizer = sorted(OPTIMIZERS)[number // 2 % 2]
    alone = _twenty_steps(family, "rows", 1, optimizer)
    for s in range(number % 2, len(STRATEGIES), 2):
        strategy, world = STRATEGIES[s], WORLDS[(number // 2 + s) % len(WORLDS)]
        expected = _twenty_steps(family, "whole", 1, optimizer) if strategy == "whole" else alone
        assert _twenty_steps(family, strategy, world, optimizer) == expected, (strategy, world)


def every_combination() -> None:
    """Families x strategies x optimizers x numbers of ranks, by ``make fuzz``; raises at the first that differs."""
    for family, optimizer in itertools.product(sorted(FAMILIES), sorted(OPTIMIZERS)):
        alone = _twenty_steps(family, "rows", 1, optimizer)
        for strategy in STRATEGIES:
            if strategy == "whole" and optimizer != "adamw":
                continue  # Muon's, whatever is said
            expected = _twenty_steps(family, "whole", 1, optimizer) if strategy == "whole" else alone
            for world in WORLDS:
                assert _twenty_steps(family, strategy, world, optimizer) == expected, (
                    family,
                    strategy,
                    world,
                )
            print(f"{family}, {strategy}, {optimizer}: the same bits on {', '.join(map(str, WORLDS))} ranks")


@pytest.mark.parametrize("strategy", ["layers", *(s for s in STRATEGIES if s != "dtensors")])
def test_microbatches_that_ranks_cant_share(strategy: str) -> None:
    """7 of them: ranks that have none in the last round follow, and one of 8 always does."""
    for family, optimizer in (("dropped" if strategy == "layers" else "mlp", "adamw"), ("routed", "sgd")):
        options: dict[str, Any] = {"optimizer": optimizer, "count": 7, "clip": 0.3}
        plain = _ranks(1, "simulated", family, strategy, **options)
        for world in (2, 3, 8):
            assert _ranks(world, "simulated", family, strategy, uneven=True, **options) == plain


def test_drawn_trainings() -> None:
    """Any family, strategy, optimizer, number of micro-batches and ranks, dtype on the wire and clipping."""
    for seed in range(4):
        draw = random.Random(seed)
        family, optimizer = draw.choice(sorted(FAMILIES)), draw.choice(sorted(OPTIMIZERS))
        strategy = draw.choice(("layers", "fsdp", "units", "sharded_ddp"))
        count, world = draw.randint(1, 9), draw.randint(2, 8)
        options: dict[str, Any] = {"optimizer": optimizer, "count": count, "clip": draw.choice((0.0, 0.3))}
        options["dtype"] = draw.choice((None, torch.bfloat16))
        alone = _ranks(1, "simulated", family, "rows", **options)
        assert _ranks(world, "simulated", family, strategy, uneven=True, **options) == alone, seed


@pytest.mark.parametrize("world", [2, 3, 4])
def test_over_gloo(world: int) -> None:
    """Processes; DTensors too, whose norm torch's clipping takes."""
    options: dict[str, Any] = {"clip": 0.2, "count": 12, "last": 4}
    plain = _ranks(1, "simulated", "transformer", "units", **options)
    for strategy in ("units", "dtensors", "sharded_ddp"):
        assert _ranks(world, "gloo", "transformer", strategy, torchs=True, **options) == plain


def _killed(rank: int, world: int, args: tuple[Any, ...], options: dict[str, Any], told: str) -> None:
    """One rank is lost in the step after those."""
    found = train(rank, world, *args, **options)
    if rank == 0:
        torch.save(found[:-1], told)
    run = Run(*args, microbatches=options["count"])
    shardkit.restore_training(options["folder"], model=run.model, optimizer=run.optimizer)
    run.backward(rank, 1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    run.backward(world + rank, 1)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "ends"),
    [("units", "adamw", (13, 27, 40)), ("sharded_ddp", "sgd", (2, 4, 6)), ("whole", "adamw", (2, 4, 6))],
)
def test_a_training_goes_on_with_other_ranks(
    tmp_path: Path, strategy: str, optimizer: str, ends: tuple[int, int, int]
) -> None:
    """40 steps on 1 rank are 13 on 4, 14 on 3, one of them killed each time, and 13 on 2, with one checkpoint."""
    alone, moved, notes = (tmp_path / name for name in ("alone", "moved", "notes"))
    alone.mkdir()
    moved.mkdir()
    args = ("dropped", strategy, optimizer)
    options: dict[str, Any] = {"clip": 0.5, "count": 12}
    whole = _ranks(1, "simulated", *args, **options, last=ends[-1], folder=str(alone))
    options["folder"] = str(moved)
    told = []
    for world, first, last in ((4, 0, ends[0]), (3, *ends[:2])):
        with pytest.raises(RankFailedError):
            run_once(
                world, "gloo", _killed, world, args, {**options, "first": first, "last": last}, str(notes)
            )
        told += torch.load(notes)
    found = _ranks(2, "gloo", *args, **options, first=ends[1], last=ends[2])
    assert [*told, *found] == whole
    there = compare(*(open_checkpoint(str(shardkit.latest(folder))) for folder in (alone, moved)))
    assert there.differences == []
    assert there.tensors > 10


# ------------------------------------------------------------ norms
def _norm(rank: int, cuts: list[int], scale: float) -> tuple[float, float, list[float]]:
    """The norm of numbers of all magnitudes, of which this rank has a part; one that is not finite; that of few."""
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1)) * scale
    values *= torch.logspace(-12, 0, len(values))
    own = list(values[cuts[rank] : cuts[rank + 1]].split(70_000))
    group = SimulatedBackend().group(None)
    like = torch.zeros((), dtype=torch.float64)

    def norm(gradients: list[torch.Tensor], norm_type: float = 2.0) -> float:
        portion = (gradients, (group,))
        return float(clip_by_global_norm([portion], [], like, 1.0, norm_type, in_order=True))  # type: ignore[list-item]

    broken = [norm([*own, torch.tensor([bad])] if rank == 0 else own) for bad in (math.inf, math.nan)]
    return norm(own), norm(own, math.inf), [*broken, norm([])]


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e18])
def test_norms_of_any_cut(scale: float) -> None:
    found = set()
    for cuts in ([0, 200_003], [0, 7, 200_003], [0, 65_536, 65_536, 190_001, 200_003]):
        for norm, largest, (infinite, broken, none) in rank_pool(len(cuts) - 1, "simulated").run(
            _norm, cuts, scale
        ):
            found.add((norm, largest))
            assert math.isinf(infinite)
            assert math.isnan(broken)
            assert none == 0.0
    [(norm, _)] = found
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1)) * scale
    squares = (values * torch.logspace(-12, 0, len(values))).double().square()
    assert norm == pytest.approx(math.sqrt(math.fsum(squares.tolist())), rel=1e-15)


# ------------------------------------------------------------ what is refused
def _refused(rank: int) -> None:
    def fails(kind: type[Exception], word: str, make: Any) -> None:
        with pytest.raises(kind, match=word):
            make()

    fixed = ReducePolicy(order="fixed", microbatches=4)
    fails(
        LifecycleError, "can't share them evenly", lambda: Run("mlp", "fsdp", microbatches=3).backward(0, 1)
    )
    run = Run("mlp", "sharded_ddp", microbatches=3)
    too_few = pytest.raises(LifecycleError, match="has 3 micro-batches, and all ranks have run 2")
    with too_few, shardkit.uneven(run.model):
        run.backward(rank, 1)
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm):
        norm = nn.Sequential(nn.Linear(2, 2), kind(2))
        fails(ConfigurationError, f"'1', a {kind.__name__}", lambda n=norm: FSDP(n, reduce=fixed))
        oss = OSS(norm.parameters(), torch.optim.SGD, lr=0.1)
        fails(ConfigurationError, kind.__name__, lambda n=norm, o=oss: ShardedDDP(n, o, reduce=fixed))
    table = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    oss = OSS(table.parameters(), torch.optim.SGD, lr=0.1)
    fails(ConfigurationError, "sparse", lambda: ShardedDDP(table, oss, reduce=fixed))
    linear = nn.Linear(2, 2)
    scaled = AdaScale(OSS(linear.parameters(), torch.optim.SGD, lr=0.1))
    fails(ConfigurationError, "AdaScale", lambda: ShardedDDP(linear, scaled, reduce=fixed))
    mixed = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), reduce=fixed), nn.Linear(2, 2)))
    fails(ConfigurationError, "the same for all units", lambda: mixed(torch.ones(1, 2)))
    for strategy in ("units", "fsdp", "sharded_ddp"):
        run = Run("mlp", strategy, "sgd", microbatches=4)
        with pytest.raises(LifecycleError, match="no_sync"):
            with (run.model if hasattr(run.model, "no_sync") else sharding_of(run.model)).no_sync():
                pass
        fails(ConfigurationError, "norm of order 1", lambda run=run: _clip_by_one(run))
        run.backward(rank, 1)
        fails(LifecycleError, "has 2 backwards on each rank, and step.. comes after 1", run.optimizer.step)
        run.backward(2 + rank, 1)
        run.optimizer.step()
        run.backward(4 + rank, 1)  # a step that is left out midway
        run.model.zero_grad()
        run.optimizer.zero_grad()
        for k in (6, 8):
            run.backward(k + rank, 1)
        run.optimizer.step()
    fails(ConfigurationError, "AdaScale", lambda: AdaScale(Run("mlp", "fsdp", "sgd").optimizer))


def _clip_by_one(run: Run) -> None:
    for k in (0, 1):
        run.backward(k, 1)
    try:
        if isinstance(run.optimizer, OSS):
            run.optimizer.clip_grad_norm(1.0, norm_type=1.0)
        else:
            sharding_of(run.model).clip_grad_norm_(1.0, 1.0)
    finally:
        run.model.zero_grad()
        run.optimizer.zero_grad()


def test_what_is_refused() -> None:
    rank_pool(2, "simulated").run(_refused)
    for options in (
        {"predivide": 2.0}, {"compression": Compression()}, {"microbatches": 0}, {"order": "arrival"}
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            ReducePolicy(**{"order": "fixed", **options})
    with pytest.raises(ConfigurationError, match="microbatches is 4"):
        ReducePolicy(microbatches=4)


@on_ranks((4, "simulated"))
def test_replicas_are_refused(rank: int) -> None:
    backend = SimulatedBackend()
    replicas, shards = shardkit.hybrid_groups(2, backend=backend)
    with pytest.raises(ConfigurationError, match="not on consecutive ranks"):
        fully_shard(
            nn.Linear(2, 2),
            group=shards,
            replicas=replicas,
            reduce=ReducePolicy(order="fixed"),
            backend=backend,
        )


def test_replicas() -> None:
    """Two and three of two shards; ranks without a gradient hear of the others', and some have no micro-batch left."""
    for family, options in (
        ("routed", {"torchs": True}), ("adapted", {"dtype": torch.bfloat16}), ("mlp", {"uneven": True, "count": 7})
    ):  # fmt: skip
        options |= {"clip": 0.3}
        plain = _ranks(1, "simulated", family, "units", **{**options, "uneven": False})
        for world in (4, 6):
            assert _ranks(world, "simulated", family, "hybrid", **options) == plain
    assert _ranks(4, "gloo", "mlp", "hybrid", **options) == plain


# ------------------------------------------------------------ micro-batches
def test_samples_of_microbatches() -> None:
    """The k-th micro-batch has the same samples on any number of ranks; what is left over is less than a step."""
    found = []
    for world in (1, 2, 3, 6):
        each = [
            list(
                GlobalBatchSampler(
                    range(63), 12, seed=3, drop_last=True, num_replicas=world, rank=r, microbatches=6
                )
            )
            for r in range(world)
        ]
        found.append([each[k % world][k // world] for k in range(sum(map(len, each)))])
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) == 30
    with pytest.raises(ConfigurationError, match="6 micro-batches for 4 ranks"):
        GlobalBatchSampler(range(63), 12, num_replicas=4, rank=0, microbatches=6)


def test_random_numbers_are_a_microbatchs() -> None:
    before = torch.get_rng_state()
    drawn = []
    for number in (0, 1, 0):
        with shardkit.microbatch(number):
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), before)
    with shardkit.microbatch(0, seed=1):
        assert not torch.equal(torch.rand(3), drawn[0])


# ------------------------------------------------------------ loss scaling
def _scaled(rank: int, world: int, strategy: str) -> list[object]:
    """Halves on the wire; a micro-batch of the second step overflows."""
    run = Run("mlp", strategy, microbatches=6, dtype=torch.float16)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    told: list[object] = []
    for step in range(3):
        for k in range(rank, 6, world):
            run.backward(6 * step + k, math.inf if (step, k) == (1, 4) else 1, scaler.scale)
        scaler.unscale_(run.optimizer)
        told.append(str(run.clip(0.3, torchs=strategy == "units").item()))
        scaler.step(run.optimizer)
        scaler.update()
        run.model.zero_grad()
        run.optimizer.zero_grad()
    return [*told, scaler.get_scale(), run.digest()]


@pytest.mark.parametrize("strategy", ["units", "fsdp", "sharded_ddp"])
def test_scaled_losses(strategy: str) -> None:
    alone, *others = [rank_pool(world, "simulated").run(_scaled, world, strategy) for world in (1, 2, 3)]
    assert alone[0][1] == "nan"
    assert alone[0][3] == 2.0**9
    for each in others:
        assert each == alone * len(each)


if __name__ == "__main__":
    every_combination()
