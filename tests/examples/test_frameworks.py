"""The scripts of frameworks in examples/: 2 ranks beside one process, and checkpoints that go from one to the next."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

for library in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(library, reason="needs the extra 'libraries'")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.border.test_libraries import Environment  # noqa: E402
from tests.integrations.test_lightning import quiet  # noqa: E402
from tests.pools import free_port, rank_pool  # noqa: E402

SCRIPTS = ("transformers_trainer", "accelerate_loop", "lightning_trainer", "fabric_loop", "torch_loop")


def script(name: str) -> Any:
    return importlib.import_module(name)


def alone(name: str, *arguments: object) -> dict[str, torch.Tensor]:
    from accelerate.state import AcceleratorState

    with quiet():
        found: dict[str, torch.Tensor] = script(name).main([str(a) for a in arguments])
    AcceleratorState._reset_state(True)
    return found


def _run(rank: int, port: int, name: str, arguments: list[str]) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    with Environment(rank, port):
        found = script(name).main(arguments)
    AcceleratorState._reset_state(True)
    return found


def on_ranks(name: str, *arguments: object) -> dict[str, torch.Tensor]:
    return rank_pool(2).run(_run, free_port(), name, [str(a) for a in arguments])[0]


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=1e-6)


def test_each_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    expected = alone("torch_loop", "--steps", 4, "--folder", tmp_path / "one")
    for name in SCRIPTS:
        close(on_ranks(name, "--steps", 4, "--folder", tmp_path / name), expected)


def test_checkpoints_go_from_one_to_the_next(tmp_path: Path) -> None:
    """Through all of them, with 2 ranks and with one process in turn."""
    expected = alone("torch_loop", "--steps", 10, "--folder", tmp_path / "one")
    on_ranks("transformers_trainer", "--steps", 2, "--folder", tmp_path)
    on_ranks("fabric_loop", "--steps", 4, "--folder", tmp_path, "--resume", tmp_path / "checkpoint-2")
    alone("accelerate_loop", "--steps", 6, "--folder", tmp_path, "--resume", tmp_path / "fabric.ckpt")
    on_ranks("torch_loop", "--steps", 8, "--folder", tmp_path, "--resume", tmp_path / "accelerate")
    found = alone("fabric_loop", "--steps", 10, "--folder", tmp_path, "--resume", tmp_path / "torch.ckpt")
    close(found, expected)
    alone("transformers_trainer", "--steps", 4, "--folder", tmp_path, "--resume", tmp_path / "checkpoint-2")
    on_ranks("accelerate_loop", "--steps", 6, "--folder", tmp_path, "--resume", tmp_path / "checkpoint-4")
    found = alone("torch_loop", "--steps", 10, "--folder", tmp_path, "--resume", tmp_path / "accelerate")
    close(found, expected)
    on_ranks("lightning_trainer", "--steps", 5, "--folder", tmp_path)
    found = on_ranks(
        "torch_loop", "--steps", 10, "--folder", tmp_path, "--resume", tmp_path / "lightning.ckpt"
    )
    close(found, expected)
