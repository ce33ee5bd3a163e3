"""transformers' Trainer; one line more.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import Trainer, TrainingArguments

from counting import BATCH, CLIP, Counting, make_model, make_optimizer, options_of
from shardkit.integrations.huggingface import ShardkitPlugin
from shardkit.types import StateDict


def main(arguments: Sequence[str] | None = None) -> StateDict:
    """Trains; returns the weights."""
    options = options_of(arguments)
    model = make_model()
    told = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        save_steps=options.steps,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    told.per_device_train_batch_size = BATCH // told.world_size
    trainer = Trainer(
        model, told, train_dataset=Counting(), optimizers=(make_optimizer(model.parameters()), None)
    )
    trainer = ShardkitPlugin().attach(trainer)  # this line
    trainer.train(resume_from_checkpoint=None if options.resume is None else str(options.resume))
    return trainer.model.state_dict()


if __name__ == "__main__":
    main()
