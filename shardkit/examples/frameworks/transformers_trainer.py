"""transformers' Trainer; one line more.

torchrun --nproc-per-node 2 -m shardkit.examples.frameworks.transformers_trainer
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Trainer, TrainingArguments

from ...integrations.huggingface import ShardkitPlugin
from ...types import StateDict
from .task import BATCH, CLIP, Counting, make_model, make_optimizer, options_of


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights."""
    options = options_of(arguments)
    model = make_model()
    told = TrainingArguments(
        output_dir=str(options.folder), max_steps=options.steps, save_steps=options.steps, max_grad_norm=CLIP,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=4, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    told.per_device_train_batch_size = BATCH // told.world_size
    trainer = Trainer(
        model, told, train_dataset=Counting(), optimizers=(make_optimizer(model.parameters()), None)
    )
    trainer = ShardkitPlugin().attach(trainer)  # this line
    trainer.train(resume_from_checkpoint=None if options.resume is None else str(options.resume))
    return trainer.model.state_dict()


if __name__ == "__main__":
    main()
