"""Lightning's Trainer.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from lightning import LightningModule, Trainer

from counting import CLIP, loader, make_model, make_optimizer, options_of
from shardkit.integrations.lightning import ShardkitStrategy
from shardkit.types import Framework, StateDict


class Counter(LightningModule):
    """The model, and how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Framework:
        return make_optimizer(self.parameters())


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights. ``--resume`` takes its own checkpoints."""
    options = options_of(arguments)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ShardkitStrategy() if world_size > 1 else "auto",
        max_steps=options.steps,
        gradient_clip_val=CLIP,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.folder,
    )
    counter = Counter()
    trainer.fit(counter, loader(rank, world_size), ckpt_path=options.resume, weights_only=True)
    trainer.save_checkpoint(options.folder / "lightning.ckpt")
    return {name.removeprefix("model."): value for name, value in counter.state_dict().items()}


if __name__ == "__main__":
    main()
