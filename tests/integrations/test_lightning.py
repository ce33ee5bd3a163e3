"""Lightning's Trainer and Fabric with their sharded strategies, beside one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("lightning", reason="needs the extra 'libraries'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

from lightning import LightningModule  # noqa: E402

from shardkit import WholeParameters, sharding_of  # noqa: E402
from shardkit.errors import ConfigurationError  # noqa: E402
from tests.border.test_libraries import Environment  # noqa: E402
from tests.pools import free_port, on_ranks, rank_pool  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A method that uses a parameter of its own, and calls the module."""
        return F.cross_entropy(self(x), y) + 0.01 * self.head.weight.pow(2).sum()


class Classifier(LightningModule):
    """The steps use parameters after the module was called, and parts of it without it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.temperature = nn.Parameter(torch.ones(()))
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.temperature

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) + 0.01 * self.net.head.weight.pow(2).sum() / self.temperature
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self(x), y) / self.temperature, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> Any:
        decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in self.named_parameters() if not n.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.05, eps=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Orthogonal(Classifier):
    """An optimizer that needs whole matrices."""

    def configure_optimizers(self) -> Any:
        rest = (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2})
        return WholeParameters(self, torch.optim.Muon, lr=0.02, rest=rest)


class Adversaries(LightningModule):
    """Optimizes two parts by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = Net(), Net()

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        for module, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            scores = self.one(x) if module is self.one else self.other(-x) + self.one(x).detach()
            self.manual_backward(F.cross_entropy(scores, y))
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-2) for m in (self.one, self.other)]


def loader(rank: int, world: int, accumulated: int = 1) -> Any:
    """This rank's part of global batches of 8."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))[rank::world]
    samples = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    return torch.utils.data.DataLoader(samples, batch_size=8 // world // accumulated)


@contextmanager
def quiet() -> Iterator[None]:
    """What launchers leave in the environment goes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def trainer_of(world: int, folder: Path, strategy: Any = "auto", **options: Any) -> Any:
    from lightning import Trainer

    return Trainer(
        accelerator="cpu", devices=world, strategy=strategy, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=False, use_distributed_sampler=False, **options,
    )  # fmt: skip


def fit(
    rank: int,
    world: int,
    folder: Path,
    strategy: Any,
    make: Any,
    resume: Path | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    module, given = make(), {"max_epochs": 2, **options}
    trainer = trainer_of(world, folder, strategy, **given)
    validated = loader(rank, world) if make is Classifier else None
    trainer.fit(
        module, loader(rank, world, given.get("accumulate_grad_batches", 1)), validated, ckpt_path=resume
    )
    trainer.save_checkpoint(folder / "last.ckpt")
    if make is Classifier:
        trainer.validate(module, loader(rank, world), verbose=False)
    return {"state": module.state_dict(), "validated": getattr(module, "validated", [])}


def _fit(
    rank: int, world: int, port: int, folder: Path, make: Any, resume: Path | None, options: dict[str, Any]
) -> Any:
    import shardkit.integrations.lightning

    with Environment(rank, port):
        strategy = "shardkit" if resume is None else shardkit.integrations.lightning.ShardkitStrategy()
        found = fit(rank, world, folder, strategy, make, resume, options)
        return found


def on_two_ranks(folder: Path, make: Any = Classifier, resume: Path | None = None, **options: Any) -> Any:
    return rank_pool(2).run(_fit, 2, free_port(), folder, make, resume, options)[0]


def in_one_process(folder: Path, make: Any = Classifier, resume: Path | None = None, **options: Any) -> Any:
    with quiet():
        return fit(0, 1, folder, "auto", make, resume, options)


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=tolerance)
    torch.testing.assert_close(found["validated"], expected["validated"], rtol=0, atol=10 * tolerance)


def test_trainer(tmp_path: Path) -> None:
    """Its checkpoints are those of one process: each goes on with the other's."""
    one, two = in_one_process(tmp_path / "1"), on_two_ranks(tmp_path / "2")
    close(two, one)
    files = [torch.load(tmp_path / k / "last.ckpt", weights_only=True) for k in ("1", "2")]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(files[1][part], files[0][part], rtol=0, atol=1e-6)
    further = in_one_process(tmp_path / "3", resume=tmp_path / "1" / "last.ckpt", max_epochs=4)
    close(in_one_process(tmp_path / "4", resume=tmp_path / "2" / "last.ckpt", max_epochs=4), further)
    close(on_two_ranks(tmp_path / "5", resume=tmp_path / "1" / "last.ckpt", max_epochs=4), further)


def test_what_trainers_are_told(tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any], float]] = [
        (Classifier, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}, 1e-6),
        (Classifier, {"precision": "bf16-mixed"}, 2e-2),
        (Classifier, {"precision": "bf16-true"}, 5e-2),
        (Adversaries, {}, 1e-6),
        (Orthogonal, {}, 1e-5),  # Muon works in bfloat16
    ]
    for k, (make, options, tolerance) in enumerate(cases):
        one = in_one_process(tmp_path / f"1{k}", make, **options)
        close(on_two_ranks(tmp_path / f"2{k}", make, **options), one, tolerance)


# ------------------------------------------------------------------------------------ Fabric
def loop(fabric: Any, folder: Path, resume: Path | None, marked: bool = True) -> dict[str, torch.Tensor]:
    """As in Fabric's guide: 4 steps of two micro-batches, a checkpoint after 2."""
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)
    net = model
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume is not None:
        rest = fabric.load(resume, state)
        assert not rest
    batches = list(loader(fabric.global_rank, fabric.world_size, 2))
    for step in range(state["step"], 4):
        for k in (0, 1):
            x, y = batches[2 * step + k]
            with fabric.no_backward_sync(model, enabled=k == 0):
                fabric.backward(model.loss(x, y) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if step == 1:
            fabric.save(folder / "half.ckpt", state)
            fabric.save(folder / "optimizer.pt", {"optimizer": optimizer})
    model.eval()
    with torch.no_grad():
        model(batches[0][0])
    return net.state_dict()


def _loop(rank: int, port: int, folder: Path, resume: Path | None, precision: Any) -> Any:
    from lightning import Fabric

    from shardkit.integrations.fabric import ShardkitStrategy
    from shardkit.integrations.sharding import Sharding

    with Environment(rank, port):
        strategy = "shardkit" if resume is None else ShardkitStrategy(Sharding(units=[Block]))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
        fabric.launch()
        return loop(fabric, folder, resume)


def alone(folder: Path, resume: Path | None = None, precision: Any = "32-true") -> Any:
    from lightning import Fabric

    with quiet():
        return loop(Fabric(accelerator="cpu", devices=1, precision=precision), folder, resume)


def test_fabric(tmp_path: Path) -> None:
    one = alone(tmp_path / "1")
    for precision, tolerance in (("32-true", 1e-6), ("bf16-mixed", 2e-2)):
        folder = tmp_path / precision
        two = rank_pool(2).run(_loop, free_port(), folder, None, precision)[0]
        torch.testing.assert_close(two, one, rtol=0, atol=tolerance)
    files = [torch.load(tmp_path / k / "half.ckpt", weights_only=True) for k in ("1", "32-true")]
    torch.testing.assert_close(files[1], files[0], rtol=0, atol=1e-6)
    resumed = rank_pool(2).run(_loop, free_port(), tmp_path / "3", tmp_path / "1" / "half.ckpt", "32-true")[0]
    torch.testing.assert_close(resumed, one, rtol=0, atol=1e-6)
    resumed = alone(tmp_path / "4", tmp_path / "32-true" / "half.ckpt")
    torch.testing.assert_close(resumed, one, rtol=0, atol=1e-6)


class OfItsOwn(Adversaries):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@on_ranks(2)
def test_manual_optimization_of_own_parameters_is_refused(rank: int, port: int, tmp_path: Path) -> None:
    from shardkit.integrations.lightning import ShardkitStrategy

    with Environment(rank, port):
        with pytest.raises(ConfigurationError, match=r"optimizes manually .*\(scale\)"):
            trainer_of(2, tmp_path, ShardkitStrategy(), max_epochs=1).fit(OfItsOwn(), loader(rank, 2))
        module = Adversaries()
        trainer_of(2, tmp_path, ShardkitStrategy(), max_epochs=1).fit(module, loader(rank, 2))
        assert sharding_of(module.one.blocks[0]) is not None
