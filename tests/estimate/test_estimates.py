"""Estimates beside what trainings really take, and what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.policy import Frozen
from shardkit.tools import cli
from shardkit.tools.estimate import (
    DEVICES,
    STRATEGIES,
    Subject,
    estimate,
    from_experiment,
    smallest_ranks,
    with_adapters,
)
from shardkit.tools.verify import Experiment
from tests.estimate.subjects import ADAMW, SUBJECTS, in_a_row, layers, layers_loss, measured
from tests.pools import rank_pool

CASES = [
    ("language", "fsdp", 2),
    ("language", "sharded_ddp", 2),
    ("language, recomputed", "fsdp", 2),
    ("language, partly frozen", "fully_shard", 2),
    ("language, bfloat16", "fsdp", 2),
    ("language, adapters on packed weights", "fsdp", 2),
    ("language, adapters on kept weights", "fsdp", 2),
    ("layers", "fsdp", 3),
    ("images", "fsdp-kept", 3),
]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "gemma2", "mamba"])
def test_kinds_of_language_models(kind: str, tmp_path: Path) -> None:
    """Experts, attention of their own, none at all."""
    pytest.importorskip("transformers")
    from shardkit.tools.estimate import from_hugging_face

    path = tmp_path / "config.json"
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
    path.write_text(json.dumps({"model_type": kind, **sizes}))
    found = estimate(from_hugging_face(path, compute=torch.bfloat16, sequence=16), "fsdp", 8, 2)
    # two blocks and the root; mamba's mixers are units within their blocks, and small ones travel together
    assert found.collectives["reduce_scatter"] == (4 if kind == "mamba" else 3)


@pytest.mark.parametrize(("name", "strategy", "ranks"), CASES)
def test_the_peak_is_what_is_measured(name: str, strategy: str, ranks: int) -> None:
    batch = 32 if name == "images" else 4  # of few images, what convolutions need within themselves shows
    found = estimate(SUBJECTS[name], strategy, ranks, batch, on_host=True)
    real = rank_pool(ranks).run(measured, name, strategy, batch)
    assert found.peak == pytest.approx(max(m.peak for m in real), rel=0.03)
    assert found.resident == pytest.approx(max(m.resident for m in real), rel=0.03)
    assert sum(found.kinds.values()) == found.peak


def test_many_ranks_and_bytes_sent() -> None:
    parameters = sum(p.numel() for p in layers().parameters())
    for ranks in (1, 1024):
        share = (ranks - 1) / ranks
        found = {s: estimate(SUBJECTS["layers"], s, ranks, 4) for s in STRATEGIES}
        assert found["fsdp"].sent >= 4 * 2 * parameters * share  # the last unit stays, and is gathered once
        assert found["fsdp"].sent <= 4 * 3.01 * parameters * share
        assert found["fsdp-kept"].sent == pytest.approx(4 * 2 * parameters * share, rel=0.01)
        assert found["sharded_ddp"].sent == pytest.approx(4 * 2 * parameters * share, rel=0.01)
        assert all(e.parameters == parameters for e in found.values())
        if ranks > 1:
            assert found["fsdp"].kinds["parameters"] == pytest.approx(4 * parameters / ranks, rel=0.05)
            assert found["sharded_ddp"].kinds["parameters"] >= 4 * parameters


def test_masters_on_the_host_leave_what_is_computed_with() -> None:
    """The device has a copy of the shards in bf16; nothing in fp32 but one unit's worth."""
    name, ranks = "language, bfloat16", 4
    found, kept = (estimate(SUBJECTS[name], s, ranks, 1) for s in ("fsdp-masters", "fsdp"))
    assert found.kinds["optimizer state"] == 0
    assert found.kinds["parameters"] == pytest.approx(kept.kinds["parameters"] / 2, rel=0.05)
    assert found.sent == kept.sent
    states = 8 * found.parameters / ranks
    assert found.resident == pytest.approx(kept.resident - states - kept.kinds["parameters"] / 2, rel=0.05)


def test_the_bus_and_the_host_take_time_where_masters_are_there() -> None:
    """P bytes down and P up: as slow as the slower of both, and hidden where the device has as much to compute."""
    subject, step, exposed = SUBJECTS["language, bfloat16"], {}, {}
    # a small model computes for long
    h100 = replace(DEVICES["h100"], memory_bandwidth=1e10, launch=1e-9)
    for name, bus, host in (
        ("free", 1e30, 1e30),
        ("bus", 64e9, 1e30),
        ("slow bus", 1e6, 1e30),
        ("host", 1e30, 1e9),
    ):
        device = replace(h100, bus=bus, host_bandwidth=host)
        times = estimate(subject, "fsdp-masters", 4, 1, device=device).times["fsdp-masters"]
        step[name], exposed[name] = times.step, times.exposed
    kept = estimate(subject, "fsdp", 4, 1, device=h100)
    nbytes = 2 * kept.parameters / 4
    assert step["free"] < kept.times["fsdp"].step  # the optimizer takes no time
    assert exposed["bus"] - exposed["free"] < 0.5 * 2 * nbytes / 64e9 / h100.link_share
    assert step["slow bus"] >= nbytes / 1e6 / h100.link_share
    assert step["host"] - step["free"] > 12 * kept.parameters / 4 / 1e9


def test_frozen_weights() -> None:
    """Kept ones are there between steps and sent never; on the host neither; packed ones are small in both."""
    found = {f: estimate(with_adapters(SUBJECTS["language"], 2, f), "fsdp", 8, 4) for f in get_args(Frozen)}
    assert found["keep"].sent == found["host"].sent < found["packed"].sent < 0.4 * found["reshard"].sent
    assert (
        found["packed"].resident
        < found["host"].resident
        <= found["reshard"].resident
        < found["keep"].resident
    )
    with pytest.raises(ConfigurationError, match="every rank has all weights"):
        estimate(with_adapters(SUBJECTS["language"], 2, "keep"), "sharded_ddp", 2)


def test_the_fewest_ranks_that_fit() -> None:
    subject = SUBJECTS["layers"]
    limit = estimate(subject, "fsdp", 5, 4).peak
    found = smallest_ranks(subject, "fsdp", 4, limit)
    assert found is not None
    assert found.ranks == 5
    assert smallest_ranks(subject, "fsdp", 4, limit // 20) is None  # a gathered unit alone is more


def test_the_course_of_a_step() -> None:
    found = estimate(SUBJECTS["language"], "fsdp", 4, 2, points=50)
    assert 40 <= len(found.course) <= 110
    totals = [sum(kinds.values()) for _, kinds in found.course]
    assert max(totals) == found.peak
    assert all(count >= 0 for _, kinds in found.course for count in kinds.values())
    half = len(totals) // 2
    assert any(kinds["activations"] > 0 for _, kinds in found.course[:half])
    assert any(kinds["gradients"] > 0 for _, kinds in found.course[half:])


class Wide(nn.Module):
    """Far more than this machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2**15, 2**15) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def _wide_units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    for k, layer in enumerate(model.layers):
        model.layers[k] = unit(layer)


def test_models_that_fit_nowhere() -> None:
    subject = Subject("wide", Wide, lambda m, b: m(torch.zeros(b, 2**15)).square().mean(), ADAMW, _wide_units)
    found = estimate(subject, "fsdp", 512, 8)
    assert found.parameters == 40 * (2**30 + 2**15)
    assert found.peak < 40 * 2**30


def _reads_values(model: nn.Module, batch: int) -> torch.Tensor:
    loss = layers_loss(model, batch)
    return loss * loss.item()


def test_what_can_not_be_estimated() -> None:
    subject = SUBJECTS["layers"]
    with pytest.raises(ConfigurationError, match="no strategy 'zero'; choose of 'fsdp'"):
        estimate(subject, "zero", 2)
    with pytest.raises(ConfigurationError, match="both have to be 1 or more"):
        estimate(subject, "fsdp", 0)
    with pytest.raises(ConfigurationError, match="needs values, which the meta device does not have"):
        estimate(Subject("reads", layers, _reads_values, ADAMW, in_a_row), "fsdp", 2)


# ------------------------------------------------------------------ the command
def experiment() -> Experiment:
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.zeros(2, 256)

    def loss(model: nn.Module, x: Any) -> torch.Tensor:
        return model(x).square().mean()

    return Experiment(layers, batch, loss, torch.optim.AdamW, {"lr": 0.1}, in_a_row)


def test_experiments() -> None:
    subject = from_experiment("tests.estimate.test_estimates:experiment")
    for batch in (4, 16):
        assert estimate(subject, "fsdp", 4, batch).peak == estimate(SUBJECTS["layers"], "fsdp", 4, batch).peak
    with pytest.raises(ConfigurationError, match=r"torch\.optim has no optimizer 'Lamp'"):
        from_experiment("tests.estimate.test_estimates:experiment", "Lamp")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "tests.estimate.test_estimates:experiment"
    assert (
        cli.main(
            ["estimate", target, "--ranks", "2", "--strategy", "fsdp,sharded_ddp", "--device-memory", "24MiB"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "1,796,780 parameters" in text
    assert text.count("sharded_ddp") == 2
    assert "fsdp, batch 1: 2 ranks are enough for 24 MiB on each" in text
    assert cli.main(["estimate", target, "--ranks", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["estimates"]
    assert sum(found["kinds"].values()) == found["peak"]
    assert cli.main(["estimate", target, "--lora", "rank=2", "--frozen", "packed"]) == 0
    assert "fsdp, 8 ranks, batch 1: a device of 8 GB is enough" in capsys.readouterr().out
    assert cli.main(["estimate", target, "--frozen", "packed"]) == 2
    assert cli.main(["estimate"]) == 2
    assert "name a target" in capsys.readouterr().err
    assert cli.main(["estimate", target, "--dtype", "int7"]) == 2
    capsys.readouterr()
    for wrong in (["--device-memory", "much"], ["--ranks", "many"], ["--ranks", "8,0"]):
        with pytest.raises(SystemExit):
            cli.main(["estimate", target, *wrong])
        assert f"{wrong[1]}: write " in capsys.readouterr().err


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = "tests.estimate.test_estimates:experiment"
    path = tmp_path / "out.svg"
    assert (
        cli.main(
            ["estimate", target, "--ranks", "2,8", "--strategy", "fsdp,fully_shard", "--plot", str(path)]
        )
        == 0
    )
    assert "<svg" in path.read_text()[:1000]


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from shardkit.tools.estimate import from_hugging_face

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "intermediate_size": 100,
                                "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}))  # fmt: skip
    plain = estimate(from_hugging_face(path, sequence=256), "fsdp", 4, 2)
    again = estimate(from_hugging_face(path, sequence=256, checkpointing=True), "fsdp", 4, 2)
    assert again.kinds["activations"] < plain.kinds["activations"]
    half = estimate(from_hugging_face(path, sequence=256, compute=torch.bfloat16), "fsdp", 4, 2)
    assert half.peak < plain.peak
    path.write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(
        ConfigurationError, match=r"vit can't be estimated: .* raised ValueError: Unrecognized"
    ):
        estimate(from_hugging_face(path), "fsdp", 4)
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"is no config\.json"):
        from_hugging_face(path)
