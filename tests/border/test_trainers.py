"""transformers' Trainer, as it is, with sharded models; the truth is the same Trainer with DistributedDataParallel."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import FSDP, OSS, ShardedDDP
from shardkit.errors import ConfigurationError
from tests.pools import free_port, rank_pool

pytest.importorskip(
    "transformers", reason="libraries of the extra 'libraries' are tested where they are installed"
)
from tests.border.test_libraries import Environment, gap, llama, sharded, tokens


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """With a column that no model knows."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.randint(3, 33, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.clone(), "title": index}


def _wrapped(strategy: str) -> tuple[Any, torch.optim.Optimizer]:
    model, options = llama(), {"lr": 0.1, "momentum": 0.9}
    if strategy == "sharded_ddp":
        optimizer = OSS(model.parameters(), torch.optim.SGD, **options)  # type: ignore[arg-type]
        return ShardedDDP(model, optimizer), optimizer
    if strategy != "plain":
        model = sharded(model, flatten=strategy != "unflattened")
    return model, torch.optim.SGD(model.parameters(), **options)


def _trainer(strategy: str, folder: Path, **options: Any) -> Any:
    """As users write it: what all ranks have to do is done before rank 0 saves."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Saving(Trainer):  # type: ignore[misc]
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            self._save(output_dir, state_dict=self.model.state_dict())  # on all ranks; rank 0 writes

    class Consolidating(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if control.should_save and isinstance(optimizer, OSS):
                optimizer.consolidate_state_dict()

    model, optimizer = _wrapped(strategy)
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4, use_cpu=True,
        logging_steps=1, save_steps=2, gradient_accumulation_steps=2, max_grad_norm=0.1, report_to=[],
        label_names=["labels"], disable_tqdm=True, seed=0, **{"save_strategy": "steps", **options},
    )  # fmt: skip
    kind = Trainer if strategy == "plain" else Saving
    return kind(
        model=model,
        args=arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Consolidating()],
    )


def _history(trainer: Any) -> list[float]:
    """Losses and norms of each step."""
    return [h[key] for h in trainer.state.log_history for key in ("loss", "grad_norm") if key in h]


def _close(mine: list[float], truth: list[float]) -> bool:
    return mine == pytest.approx(truth, abs=2e-4)


def _state_of(trainer: Any) -> dict[str, torch.Tensor]:
    found = trainer.model.state_dict()
    return {n.removeprefix("module."): v.clone() for n, v in found.items()}


def _train(rank: int, world: int, port: int, folder: Path) -> None:
    from accelerate.state import AcceleratorState

    results = {}
    with Environment(rank, port):
        for strategy in ("plain", "fsdp", "unflattened", "sharded_ddp"):
            AcceleratorState._reset_state(True)
            trainer = _trainer(strategy, folder / strategy)
            trainer.train()
            loss = trainer.evaluate()["eval_loss"]
            results[strategy] = (_history(trainer), loss, _state_of(trainer))
            if strategy == "plain":
                continue
            truth = results["plain"]
            assert isinstance(trainer.model_wrapped, FSDP | ShardedDDP)
            assert _close(results[strategy][0], truth[0]), (results[strategy][0], truth[0])
            assert loss == pytest.approx(truth[1], abs=1e-4)
            assert gap(results[strategy][2], truth[2]) <= 1e-5
            generated = trainer.model.eval().generate(tokens(0), max_new_tokens=3, do_sample=False)
            assert generated.shape == (2, 10)
            if strategy == "sharded_ddp":
                trainer.model.module.save_pretrained(folder / "module")
                dist.barrier()
                saved = type(trainer.model.module).from_pretrained(folder / "module")
                assert gap(saved.state_dict(), results[strategy][2]) == 0
            # again from the middle
            AcceleratorState._reset_state(True)
            again = _trainer(strategy, folder / "again" / strategy)
            if strategy == "sharded_ddp":
                again.train(resume_from_checkpoint=str(folder / strategy / "checkpoint-2"))
                assert gap(_state_of(again), truth[2]) <= 1e-5
            else:  # the file has rank 0's shards only
                with pytest.raises(ConfigurationError, match="rank 1 has loaded optimizer state of rank 0"):
                    again.train(resume_from_checkpoint=str(folder / strategy / "checkpoint-2"))
            dist.barrier()
        AcceleratorState._reset_state(True)
        trainer = _trainer("fsdp", folder / "bf16", bf16=True)
        with pytest.raises(ConfigurationError, match="PrecisionPolicy"):
            trainer.train()
        AcceleratorState._reset_state(True)


def test_trainer(tmp_path: Path) -> None:
    rank_pool(2).run(_train, 2, free_port(), tmp_path)


class Named(nn.Module):
    """With parameters that have names, kinds and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, /, labels: int = 3, *, scale: float = 1.0) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(x) * scale + labels
        return outputs


def _signatures(rank: int) -> None:
    truth = inspect.signature(Named().forward)
    model = Named()
    wrappers: list[Any] = [ShardedDDP(model, OSS(model.parameters(), lr=0.1)), FSDP(Named())]
    model = Named()
    model.inner = FSDP(model.inner)  # type: ignore[assignment]
    wrappers.append(FSDP(model))
    for wrapper in wrappers:
        assert inspect.signature(wrapper.forward) == truth
        assert inspect.signature(type(wrapper).forward) != truth  # of all of them
        assert wrapper.forward.__self__ is wrapper
        x = torch.ones(1, 2)
        torch.testing.assert_close(wrapper.forward(x, scale=2.0), wrapper(x, 3, scale=2.0))
        wrapper.forward = lambda *args, **kwargs: "mine"  # as libraries do that add to it
        assert wrapper(x) == "mine"


def test_forward_has_the_signature_of_the_wrapped_module() -> None:
    rank_pool(2).run(_signatures)
