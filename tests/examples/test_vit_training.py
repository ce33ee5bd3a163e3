"""The script of the 10-billion example at a tiny size: trains, tests, saves, goes on, is put together."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import run_vit_training as script
import shardkit
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError
from shardkit.xla.fsdp import consolidate_sharded_ckpts
from tests.backends.environments import environments
from tests.examples import tiny_data
from tests.pools import rank_pool
from training import count_found, held_out_batches
from vit import VisionTransformer

TINY = (
    "--image_size 16 --patch_size 8 --embed_dim 16 --num_heads 2 --num_blocks 2 --mlp_ratio 2 --num_classes 2 "
    "--batch_size 8 --warmup_steps 2 --lr 0.01 --log_step_interval 2 --ckpt_epoch_interval 1 --test_epoch_interval 1"
)
TWO = [p for p in environments("gloo", "xla") if p.values[1] == 2]
WORKERS = {"gloo": 1, "xla": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL", reason="images are read with pillow (extra: demo)")
    return tiny_data.image_folders(tmp_path_factory.mktemp("images"))


def options_of(folder: Path, ckpts: Path, backend: str, more: str = "") -> Namespace:
    where = [
        "--data_dir",
        str(folder),
        "--ckpt_dir",
        str(ckpts),
        "--backend",
        backend,
        "--num_workers",
        "0",
    ]
    return script.parse([*TINY.split(), *where, *more.split()])


def trained(options: Namespace) -> list[script.Outcome]:
    return rank_pool(2, options.backend).run(script.train, options)


def leaves(folder: Path, epoch: int) -> list[Any]:
    """Model and optimizer of all ranks' files, as plain numbers."""
    files = [shardkit.load(script.path_of(str(folder), epoch, rank)) for rank in range(2)]
    found = tree_leaves([{k: f[k] for k in ("model", "optimizer")} for f in files])
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in found]


def test_defaults_are_ten_billion_parameters() -> None:
    options = script.parse([])
    with torch.device("meta"):
        model = VisionTransformer(script.config_of(options))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(10.08e9, rel=0.01)
    assert (options.data_dir, options.batch_size, options.grad_ckpt) == ("/datasets/imagenet-1k", 1024, True)
    turned = script.parse(
        ["--no_grad_ckpt", "--no_reshard_after_forward", "--flatten_parameters", "--shard_on_cpu"]
    )
    assert (turned.grad_ckpt, turned.reshard_after_forward) == (False, False)
    assert turned.flatten_parameters
    assert turned.shard_on_cpu


@pytest.mark.parametrize(("backend", "world_size"), TWO)
def test_trains_saves_goes_on_and_tests(backend: str, world_size: int, folder: Path, tmp_path: Path) -> None:
    """A run that goes on ends with the bits of one that nothing interrupted; workers cut images as ranks do."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    first, second = trained(
        options_of(folder, whole, backend, f"--num_epochs 2 --num_workers {WORKERS[backend]}")
    )
    assert first == second
    parts.mkdir()
    for path in whole.glob("epoch_1_*"):
        (parts / path.name).write_bytes(path.read_bytes())
    last, _ = trained(options_of(folder, parts, backend, "--num_epochs 2 --resume_epoch 1"))
    assert last == (first.losses[2:], first.accuracy)
    assert leaves(parts, 2) == leaves(whole, 2) != leaves(whole, 1)
    consolidate_sharded_ckpts.main(["--ckpt_prefix", f"{whole}/epoch_2", "--ckpt_suffix", "_rank_*.ckpt"])
    options = options_of(folder, whole, backend)
    model = VisionTransformer(script.config_of(options))
    model.load_state_dict(shardkit.load(whole / "epoch_2_consolidated.pth")["model"])
    held_out = script.load_data(options).held_out
    found = count_found(model, held_out_batches(held_out, 4), get_backend("gloo"))
    assert int(found) == first.accuracy * len(held_out)


def test_learns_alike_in_every_mode(folder: Path, tmp_path: Path) -> None:
    """Also without FSDP; the losses are the means of all ranks."""
    modes = (
        "",
        "--flatten_parameters --no_reshard_after_forward --no_grad_ckpt --shard_on_cpu",
        "--run_without_fsdp",
    )
    outcomes = [
        trained(options_of(folder, tmp_path / str(k), "gloo", f"--num_epochs 2 {mode}"))[0]
        for k, mode in enumerate(modes)
    ]
    losses = outcomes[0].losses
    assert losses[-1] < losses[0] / 2
    for outcome in outcomes[1:]:
        assert outcome.losses == pytest.approx(losses, rel=1e-4)
    assert [p.name for p in (tmp_path / "2").glob("epoch_2*")] == ["epoch_2_rank_0.ckpt"]
    with pytest.raises(ConfigurationError, match="it was saved without FSDP"):
        consolidate_sharded_ckpts.main(
            ["--ckpt_prefix", f"{tmp_path}/2/epoch_2", "--ckpt_suffix", "_rank_*.ckpt"]
        )
    trained(options_of(folder, tmp_path / "2", "gloo", "--num_epochs 3 --resume_epoch 2 --run_without_fsdp"))
    options = options_of(folder, tmp_path / "2", "gloo", "--num_epochs 4 --resume_epoch 3")
    for said in rank_pool(2).run(_refused, options):
        assert "rank 1 can't go on" in said or "rank 0 can't go on" in said
        assert "saved without FSDP; choose --run_without_fsdp as then" in said


def _refused(rank: int, options: Namespace) -> str:
    with pytest.raises(ConfigurationError) as refused:
        script.train(rank, options)
    return str(refused.value)


def test_what_it_cannot_go_on_from(folder: Path, tmp_path: Path) -> None:
    """Every rank says what one of them misses."""
    trained(options_of(folder, tmp_path, "gloo", "--num_epochs 1"))
    first, second = (script.path_of(str(tmp_path), 1, rank) for rank in range(2))
    options = options_of(folder, tmp_path, "gloo", "--num_epochs 2 --resume_epoch 1")
    first.write_bytes(second.read_bytes())
    for said in rank_pool(2).run(_refused, options):
        assert "rank 0 can't go on" in said
        assert "it is of rank 1 of 2, this is rank 0 of 2; shards are for as many ranks" in said
    trained(options_of(folder, tmp_path / "other", "gloo", "--num_epochs 1"))
    first.write_bytes(script.path_of(str(tmp_path / "other"), 1, 0).read_bytes())
    for said in rank_pool(2).run(_refused, options):
        assert "these shards were not saved together" in said
    first.unlink()
    for said in rank_pool(2).run(_refused, options):
        assert "FileNotFoundError" in said
        assert "epoch_1_rank_0.ckpt" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--batch_size 7", "is of all ranks together; 2 ranks don't divide it"),
        ("--num_epochs 2 --resume_epoch 2", "--resume_epoch is from 0 to 1"),
        ("--patch_size 5", "has to divide --image_size"),
        ("--log_step_interval 0", "has to be at least 1"),
        ("--patch_size 0", "--patch_size has to be at least 1"),
        ("--num_heads 0", "--num_heads has to be at least 1"),
        ("--num_workers -1", "can't be below 0"),
        (f"--ckpt_dir {__file__}", "test_vit_training.py is no folder"),
    ],
)
def test_bad_numbers_are_refused(more: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse([*TINY.split(), *more.split()])
    assert says in capsys.readouterr().err
