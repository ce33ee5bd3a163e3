"""Every command line of the documents, as printed: the scripts are those of examples/.

Only the folder of a script (or the package of a module) and the folders of data and checkpoints are others. Flags that
make a run small are added behind the printed ones; ``test_what_they_ask_for`` looks at these alone.
"""

from __future__ import annotations

import importlib
import json
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import imagenet
import mnist
import shardkit
import training
from shardkit.xla.fsdp import consolidate_sharded_ckpts
from tests.examples import tiny_data
from tests.pools import rank_pool
from tests.seeds.running import SNIPPETS
from tests.started import ran

COMMANDS = (SNIPPETS / "commands.txt").read_text().splitlines()
GUIDES = Path(__file__).resolve().parents[2] / "examples"
BACKENDS = [
    "gloo",
    pytest.param(
        "xla",
        marks=[
            pytest.mark.xla,
            pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla"),
        ],
    ),
]


def command(start: str) -> tuple[str, list[str]]:
    """Name and arguments of the command that runs this script or module."""
    (line,) = (c for c in COMMANDS if f"{start} " in f"{c} " and "–" not in c)  # noqa: RUF001
    words = shlex.split(line)
    place = words.index("-m") + 1 if "-m" in words else 1
    return Path(words[place]).stem, words[place + 1 :]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is /tmp to the scripts, and their working directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a script's ``main`` with the ranks of the session."""

    def launch(fn: Callable[..., Any], world_size: int, *, backend: str, args: tuple[Any, ...]) -> list[Any]:
        return rank_pool(world_size, backend).run(fn, *args)

    def run(name: str, arguments: list[str], *more: str) -> int:
        replaced = {"/tmp/": f"{temporary}/", "/datasets/": f"{temporary}/datasets/"}
        for old, new in replaced.items():
            arguments = [a.replace(old, new) if a.startswith(old) else a for a in arguments]
        return int(importlib.import_module(name).main([*arguments, *more]))

    monkeypatch.setattr(shardkit, "launch", launch)
    return run


def test_all_commands_are_here() -> None:
    known = {
        "test_train_mp_imagenet", "test_train_mp_mnist", "test_train_mp_imagenet_fsdp",
        "test_train_mp_mnist_fsdp_with_ckpt", "torch_xla.distributed.fsdp.consolidate_sharded_ckpts",
    }  # fmt: skip
    lines = [shlex.split(line.replace("“", '"').replace("”", '"')) for line in COMMANDS]
    names = [w[2] if w[1] == "-m" else Path(w[1]).stem for w in lines]
    assert (set(names), len(names)) == (known, 7)
    assert {p.stem for p in GUIDES.glob("test_*.py")} == {n for n in known if n.startswith("test_")}


# ------------------------------------------------------------ what the printed flags mean
def _asked(monkeypatch: pytest.MonkeyPatch, start: str) -> Namespace:
    found: list[Namespace] = []
    for module in (mnist, imagenet):
        monkeypatch.setattr(module, "run", lambda options: found.append(options) or 0)
    name, arguments = command(start)
    assert importlib.import_module(name).main(arguments) == 0
    return found[0]


def test_what_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = "gloo" if find_spec("torch_xla") is None else "xla"
    asked = _asked(monkeypatch, "test_train_mp_imagenet_fsdp.py")
    assert asked.datadir == "/datasets/imagenet-1k"
    assert asked.drop_last
    assert (asked.model, asked.strategy, asked.backend) == ("resnet50", "xla_fsdp", backend)
    assert (asked.batch_size, asked.test_set_batch_size, asked.eval_interval) == (128, 64, 10)
    assert asked.use_nested_fsdp
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=asked.lr)
    schedule, steps, rates = training.make_schedule(asked, optimizer, 4), asked.num_epochs * 4, []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert steps == 400
    assert rates[:20] == pytest.approx([0.4 * (step + 1) / 20 for step in range(20)])  # 5 epochs
    for epoch, rate in ((5, 0.4), (29, 0.4), (30, 0.04), (59, 0.04), (60, 0.004), (99, 0.0004)):
        assert rates[4 * epoch] == pytest.approx(rate), epoch

    asked = _asked(monkeypatch, "test_train_mp_imagenet.py")
    assert (asked.model, asked.strategy, asked.num_epochs, asked.fake_data) == ("resnet50", "native", 1, True)
    asked = _asked(monkeypatch, "test_train_mp_mnist_fsdp_with_ckpt.py")
    assert (asked.batch_size, asked.num_epochs, asked.drop_last) == (16, 2, True)
    assert asked.use_nested_fsdp
    assert asked.use_gradient_checkpointing
    assert asked.ckpt_prefix == str(Path(tempfile.gettempdir()) / "mnist-fsdp" / "final_ckpt")
    assert (asked.lr, asked.momentum, asked.lr_scheduler_type) == (0.01, 0.5, "none")


# ------------------------------------------------------------ runs
@pytest.mark.parametrize("backend", BACKENDS)
def test_mnist_fsdp_and_consolidation(
    backend: str, temporary: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_data.mnist(temporary / "mnist-data")
    name, arguments = command("test_train_mp_mnist_fsdp_with_ckpt.py")
    assert run(name, arguments, "--backend", backend) == 0
    printed = capsys.readouterr().out
    assert printed.count("accuracy") == 3  # after each epoch, and of the saved model alone
    whole = temporary / "mnist-fsdp" / "final_ckpt_consolidated.pth"
    by_script = torch.load(whole)["model"]
    assert by_script.keys() == mnist.MnistNet().state_dict().keys()
    whole.unlink()
    _, arguments = command("torch_xla.distributed.fsdp.consolidate_sharded_ckpts")
    arguments = [a.replace("/tmp/", f"{temporary}/") for a in arguments]
    consolidate_sharded_ckpts.main(arguments)
    by_command = torch.load(whole)["model"]
    for key, value in by_script.items():
        assert torch.equal(by_command[key], value), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_mnist_with_real_data_and_curves(backend: str, temporary: Path, run: Callable[..., int]) -> None:
    """The command has no --datadir: data are in /tmp/mnist-data; no --drop_last: the last batch is smaller."""
    tiny_data.mnist(temporary / "mnist-data", train=75)
    name, arguments = command("test_train_mp_mnist.py --logdir")
    assert (
        run(name, arguments, "--num_epochs", "3", "--batch_size", "12", "--lr", "0.05", "--backend", backend)
        == 0
    )
    if find_spec("tensorboard") is None:
        lines = (temporary / "mnist" / "metrics.jsonl").read_text().splitlines()
        curves = [json.loads(line) for line in lines]
        assert [c["step"] for c in curves] == [1, 2, 3]
        assert curves[2]["Loss/train"] < curves[0]["Loss/train"]
        assert curves[2]["Accuracy/test"] > 0.3
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(temporary / "mnist")).Reload()
    accuracies = [(e.step, e.value > 0.3) for e in events.Scalars("Accuracy/test")]
    assert [step for step, _ in accuracies] == [1, 2, 3]
    assert accuracies[2][1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_imagenet_fsdp(
    backend: str, temporary: Path, run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="images are read with pillow (extra: demo)")
    tiny_data.image_folders(temporary / "datasets" / "imagenet-1k")
    name, arguments = command("test_train_mp_imagenet_fsdp.py")
    small = (
        "--model tiny --batch_size 4 --num_epochs 2 --eval_interval 1 --image_size 16 --test_set_batch_size 4"
    )
    assert run(name, arguments, *small.split(), "--backend", backend, "--num_workers", "0") == 0
    assert "after epoch 1: accuracy" in capsys.readouterr().out


def test_fake_data_natively_and_with_ddp(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    name, arguments = command("test_train_mp_mnist.py --fake_data")
    for strategy, flags in {"native": [], "ddp": ["--ddp"]}.items():
        assert run(name, arguments, "--num_epochs", "1", "--backend", "gloo", *flags) == 0
        assert f"mnist, {strategy} on 2 ranks" in capsys.readouterr().out
    name, arguments = command("test_train_mp_imagenet.py")
    assert run(name, arguments, *["--model", "tiny", "--batch_size", "64", "--backend", "gloo"]) == 0


@pytest.mark.parametrize(
    ("script", "flag", "says"),
    [
        ("test_train_mp_mnist.py", "--datadir", "is no folder; it should have train-images-idx3-ubyte"),
        ("test_train_mp_imagenet.py", "--datadir", "is no folder; it should have train/"),
        ("run_vit_training.py", "--data_dir", "is no folder; it should have train/"),
    ],
)
def test_without_data_as_processes(script: str, flag: str, says: str, tmp_path: Path) -> None:
    """A script that is started by its path says what is missing, before any rank starts."""
    ended = ran(str(GUIDES / script), flag, str(tmp_path / "none"))
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_accuracy_that_is_not_reached(run: Callable[..., int]) -> None:
    name, arguments = command("test_train_mp_mnist.py --fake_data")
    flags = ["--num_epochs", "1", "--backend", "gloo", "--target_accuracy", "99"]
    assert run(name, arguments, *flags) == training.MISSED
