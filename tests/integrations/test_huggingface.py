"""transformers' Trainer, accelerate's Accelerator, generate and peft on sharded models, beside one process."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import OSS, ShardedDDP, fully_shard, sharding_of
from shardkit.errors import ConfigurationError
from tests.border.test_wrappers import plain as net
from tests.pools import free_port, on_ranks, rank_pool

for library in ("transformers", "peft", "accelerate"):
    pytest.importorskip(
        library, reason="libraries of the extra 'libraries' are tested where they are installed"
    )

from tests.border.test_libraries import Environment, adapted, gap, llama, train  # noqa: E402


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    drawn = [torch.randint(3, 33, (7,), generator=draw) for _ in range(count)]
    return [{"input_ids": t, "labels": t} for t in drawn]


def trainer_of(model: Any, folder: Path, world: int, **options: Any) -> Any:
    """A global batch of 4."""
    from transformers import Trainer, TrainingArguments

    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4 // world // options.get("gradient_accumulation_steps", 1),
        "per_device_eval_batch_size": 6 // world, "max_steps": 4, "save_strategy": "steps", "save_steps": 2,
        "learning_rate": 0.05, "adam_epsilon": 1e-2, "max_grad_norm": 0.1, "weight_decay": 0.1, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "output_dir": str(folder), **options,
    }  # fmt: skip
    return Trainer(model, TrainingArguments(**arguments), train_dataset=data(), eval_dataset=data(6))


def in_one_process(make: Any, folder: Path, resume: Path | None = None, **options: Any) -> dict[str, Any]:
    """A Trainer as it is."""
    before = dict(os.environ)
    try:
        return results_of(trainer_of(make(), folder, 1, **options), resume)
    finally:
        os.environ.clear()
        os.environ.update(before)


def results_of(trainer: Any, resume: Path | None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    history = [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]
    return {"state": trainer.model.state_dict(), "eval": loss, "history": torch.tensor(history)}


def _train(
    rank: int, port: int, make: Any, folder: Path, resume: Path | None, options: dict[str, Any]
) -> Any:
    from shardkit.integrations.huggingface import ShardkitPlugin

    with Environment(rank, port):
        trainer = trainer_of(make(), folder, dist.get_world_size(), **options)
        assert ShardkitPlugin().attach(trainer) is trainer
        ShardkitPlugin().attach(trainer)  # once more is nothing
        layers = next(m for m in trainer.model.modules() if isinstance(m, nn.ModuleList))
        assert all(sharding_of(layer) is not None for layer in layers)
        results = results_of(trainer, resume)
        dist.barrier()
        return results


def trained_on_ranks(
    make: Any, folder: Path, resume: Path | None = None, world: int = 2, **options: Any
) -> dict[str, Any]:
    found: dict[str, Any] = rank_pool(world).run(_train, free_port(), make, folder, resume, options)[0]
    return found


def close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert gap(found["state"], expected["state"]) <= tolerance
    torch.testing.assert_close(found["eval"], expected["eval"], rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(found["history"], expected["history"], rtol=0, atol=10 * tolerance)


def test_trainer(tmp_path: Path) -> None:
    """Its checkpoints are those of one process: each goes on with the other's."""
    from transformers import LlamaForCausalLM

    one = in_one_process(llama, tmp_path / "one")
    two = trained_on_ranks(llama, tmp_path / "two")
    close(two, one)
    assert gap(LlamaForCausalLM.from_pretrained(tmp_path / "two").state_dict(), one["state"]) <= 1e-6
    files = [torch.load(tmp_path / name / "checkpoint-2" / "optimizer.pt") for name in ("one", "two")]
    torch.testing.assert_close(files[1], files[0], rtol=0, atol=1e-6)
    rest = {"state": one["state"], "eval": one["eval"], "history": one["history"]}
    close(in_one_process(llama, tmp_path / "a", tmp_path / "two" / "checkpoint-2"), rest)
    close(trained_on_ranks(llama, tmp_path / "b", tmp_path / "one" / "checkpoint-2"), rest)
    close(trained_on_ranks(llama, tmp_path / "c", tmp_path / "two" / "checkpoint-2", world=1), rest)


def tied() -> Any:
    return llama(tie_word_embeddings=True)


MORE: list[tuple[dict[str, Any], float]] = [
    ({"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, 1e-6),
    ({"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "learning_rate": 3.0,
      "load_best_model_at_end": True, "max_steps": 3}, 1e-5),
    ({"bf16": True}, 2e-3),
]  # fmt: skip


def test_what_trainers_are_told(tmp_path: Path) -> None:
    """Accumulation, recomputing, the best model, autocast; with tied weights."""
    for k, (options, tolerance) in enumerate(MORE):
        close(
            trained_on_ranks(tied, tmp_path / f"two{k}", **options),
            in_one_process(tied, tmp_path / f"one{k}", **options),
            tolerance,
        )


def test_trainer_with_adapters(tmp_path: Path) -> None:
    """The checkpoint has the adapters alone, under peft's names; peft reads it in one process."""
    from peft import PeftModel, get_peft_model_state_dict

    one = in_one_process(adapted, tmp_path / "one")
    two = trained_on_ranks(adapted, tmp_path / "two")
    close(two, one)
    found = get_peft_model_state_dict(PeftModel.from_pretrained(llama(), tmp_path / "two"))
    truth = get_peft_model_state_dict(PeftModel.from_pretrained(llama(), tmp_path / "one"))
    assert gap(found, truth) <= 1e-6
    close(trained_on_ranks(adapted, tmp_path / "b", tmp_path / "one" / "checkpoint-2"), one)


# ------------------------------------------------------------------------------------ peft, by hand
def in_place(model: Any) -> Any:
    for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        fully_shard(layer)
    return fully_shard(model)


@on_ranks(2)
def test_adapters_of_models_in_place(rank: int, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    model, truth = in_place(adapted()), adapted()
    train(model, truth, rank, 2)
    expected = get_peft_model_state_dict(truth)
    assert gap(get_peft_model_state_dict(model), expected) <= 1e-6
    model.save_pretrained(tmp_path / str(rank))
    again = PeftModel.from_pretrained(llama(), tmp_path / str(rank))
    assert gap(get_peft_model_state_dict(again), expected) <= 1e-6
    set_peft_model_state_dict(model, {n: v + 1 for n, v in expected.items()})
    assert gap(get_peft_model_state_dict(model), {n: v + 1 for n, v in expected.items()}) <= 1e-6
    model.load_adapter(tmp_path / str(rank), adapter_name="default")
    assert gap(get_peft_model_state_dict(model), expected) <= 1e-6
    with sharding_of(model).summon_full_params():
        model.merge_adapter()
    truth.merge_adapter()
    assert gap(model.state_dict(), truth.state_dict()) <= 1e-6


# ------------------------------------------------------------------------------------ generate
@on_ranks(2)
def test_generate_with_ranks_of_different_lengths(rank: int) -> None:
    """Ranks have prompts of other lengths, and are through at other times."""
    from tests.border.test_libraries import sharded

    for make in (llama, adapted):
        for shard in (in_place, sharded):
            model, truth = shard(make()).eval(), make().eval()
            prompt = torch.randint(3, 33, (2, 3 + 4 * rank), generator=torch.Generator().manual_seed(rank))
            for options in (
                {"max_length": 9},
                {"max_new_tokens": 5, "eos_token_id": list(range(5, 20)) if rank else None},
                {"max_new_tokens": 2 + 3 * rank, "num_beams": 2},
            ):
                expected = truth.generate(input_ids=prompt, do_sample=False, **options)
                found = model.generate(input_ids=prompt, do_sample=False, **options)
                assert torch.equal(found, expected)
            door = model if shard is sharded else sharding_of(model)
            with door.summon_full_params():
                if rank == 0:  # on this rank alone
                    found = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=3)
                    expected = truth.generate(input_ids=prompt, do_sample=False, max_new_tokens=3)
                    assert torch.equal(found, expected)
            copied = copy.deepcopy(model)
            model.train()
            train(model, make(), rank, 2)
            found = copied.generate(input_ids=prompt, do_sample=False, max_new_tokens=2 + rank)
            expected = truth.generate(input_ids=prompt, do_sample=False, max_new_tokens=2 + rank)
            assert torch.equal(found, expected)


@on_ranks(2)
def test_generate_that_calls_parts_of_the_model(rank: int, port: int, tmp_path: Path) -> None:
    """An encoder is called without the model around it; while a Trainer evaluates, too."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from shardkit.integrations.huggingface import ShardkitPlugin

    def make() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 33, "d_model": 16, "d_kv": 8, "d_ff": 23, "num_layers": 2, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))

    with Environment(rank, port):
        told = Seq2SeqTrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
            predict_with_generate=True, per_device_train_batch_size=2, per_device_eval_batch_size=3,
        )  # fmt: skip
        given = {"train_dataset": data(), "eval_dataset": data(6)}
        trainer = Seq2SeqTrainer(
            make(), told, **given, compute_metrics=lambda p: {"rows": len(p.predictions)}
        )
        trainer = ShardkitPlugin().attach(trainer)
        trainer.train()
        assert trainer.evaluate()["eval_rows"] == 6
        truth = make()
        truth.load_state_dict(trainer.model.state_dict())
        prompt = torch.randint(3, 33, (2, 3 + 4 * rank), generator=torch.Generator().manual_seed(rank))
        for model in (trainer.model, copy.deepcopy(trainer.model)):
            found = model.eval().generate(prompt, max_new_tokens=3 + rank, num_beams=2)
            assert torch.equal(found, truth.eval().generate(prompt, max_new_tokens=3 + rank, num_beams=2))
        assert inspect.signature(trainer.model.generate) == inspect.signature(truth.generate)


# ------------------------------------------------------------------------------------ accelerate
def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from shardkit.integrations.huggingface import ShardkitPlugin

    AcceleratorState._reset_state(True)
    return ShardkitPlugin(units=["Tanh", nn.Linear]).attach(Accelerator(cpu=True, **options))


def all_inputs() -> torch.Tensor:
    return torch.randn(48, 5, generator=torch.Generator().manual_seed(1))


def truth_of(steps: int) -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for x in all_inputs().split(8)[:steps]:
        model(x).pow(2).sum(1).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def _accelerate(rank: int, world: int, port: int, folder: Path, strategy: str, first: int, steps: int) -> Any:
    """A loop as in accelerate's guide: model and optimizer are made, then prepared."""
    with Environment(rank, port):
        accumulated = 2 // world if strategy == "in_place" else 1
        accelerator = _accelerator(
            gradient_accumulation_steps=accumulated, step_scheduler_with_optimizer=False
        )
        model: Any = net()
        if strategy == "stage 2":
            optimizer: Any = OSS(model.parameters(), torch.optim.AdamW, lr=0.1, eps=1e-2)
            model = ShardedDDP(model, optimizer)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(all_inputs()), batch_size=4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        if first:
            accelerator.load_state(str(folder))
        for k, (x,) in enumerate(accelerator.skip_first_batches(loader, first * accumulated)):
            with accelerator.accumulate(model):
                loss = model(x).pow(2).sum(1).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
                assert accelerator.gather_for_metrics(x).shape[0] == 4 * world
            if (k + 1) == steps * accumulated:
                break
        # safetensors takes no parts of a buffer, which are what OSS makes of parameters
        accelerator.save_state(str(folder), safe_serialization=strategy != "stage 2")
        whole = accelerator.get_state_dict(model)
        assert gap(accelerator.unwrap_model(model).state_dict(), whole) == 0
        _accelerator()
        return whole


def test_accelerate(tmp_path: Path) -> None:
    """Saved by 2 ranks, gone on with by one, and back."""
    two, one = rank_pool(2), rank_pool(1)
    folder = tmp_path / "in_place"
    found = two.run(_accelerate, 2, free_port(), folder, "in_place", 0, 2)[1]
    assert gap(found, truth_of(2)) <= 1e-6
    found = one.run(_accelerate, 1, free_port(), folder, "in_place", 2, 2)[0]
    assert gap(found, truth_of(4)) <= 1e-6
    found = two.run(_accelerate, 2, free_port(), folder, "in_place", 4, 2)[0]
    assert gap(found, truth_of(6)) <= 1e-6
    for first in (0, 3):
        found = two.run(_accelerate, 2, free_port(), tmp_path / "2", "stage 2", first, 3)[0]
    assert gap({n.removeprefix("module."): v for n, v in found.items()}, truth_of(6)) <= 1e-6


@on_ranks(2)
def test_what_is_refused(rank: int, port: int, tmp_path: Path) -> None:
    from shardkit.integrations.huggingface import ShardkitPlugin

    with Environment(rank, port):
        with pytest.raises(ConfigurationError, match="not a Linear"):
            ShardkitPlugin().attach(nn.Linear(1, 1))
        accelerator = _accelerator()
        with pytest.raises(ConfigurationError, match=r"units=Missing.*It has Linear"):
            ShardkitPlugin(units=["Missing"]).shard(net())
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigurationError, match="before its model was sharded"):
            accelerator.prepare(model, optimizer)
        model, optimizer = accelerator.prepare(net(), torch.optim.AdamW(net().parameters()))
        made = torch.optim.AdamW(model.parameters())
        prepared = accelerator.prepare(made)
        with pytest.raises(ConfigurationError, match="of 1 parameters, this optimizer has 4"):
            prepared.load_state_dict(torch.optim.AdamW([torch.ones(1)]).state_dict())
        trainer = trainer_of(in_place(llama()), tmp_path, 2)  # nobody told it
        if rank == 0:
            with pytest.raises(ConfigurationError, match=r"ShardkitPlugin\(\).attach\(trainer\)"):
                trainer.save_model()
        _accelerator()


# ------------------------------------------------------------------------------------ places of FSDP1 and FSDP2
def _by_its_own_plugin(rank: int, port: int, folder: Path, resume: Path | None, version: int) -> Any:
    import accelerate.state as states
    from torch.distributed.fsdp import FSDPModule
    from transformers import Trainer

    from shardkit import torch_fsdp, torch_fsdp2

    door = torch_fsdp2 if version == 2 else torch_fsdp
    served = {id(one) for one in door._served._theirs.values()}
    # other tests have left some of torch's in modules that Trainer does not use
    theirs = [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith("torch.") and not served.isdisjoint(map(id, vars(module).values()))
    ]
    taken = {name: sys.modules.pop(name) for name in theirs if name.partition(".")[0] != "shardkit"}
    door.install()
    try:
        with Environment(rank, port):
            config = {"fsdp_version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
            if version == 1:  # accelerate asks for a device by the names that it knows otherwise
                config |= {
                    "sync_module_states": False,
                    "cpu_ram_efficient_loading": False,
                    "use_orig_params": True,
                }
            trainer: Trainer = trainer_of(
                llama(), folder, 2, fsdp="full_shard auto_wrap", fsdp_config=config, label_smoothing_factor=0.1
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
            model: Any = trainer.model_wrapped
            if version == 2:
                assert isinstance(model, FSDPModule)
                assert type(model).__module__ == "transformers.models.llama.modeling_llama"
                assert sharding_of(model.model.layers[0]) is not None
            else:
                assert len(torch_fsdp.FullyShardedDataParallel.fsdp_modules(model)) == 3
            loss = trainer.evaluate()["eval_loss"]
            history = [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]
            state = model.state_dict()
            state = {name: value.full_tensor() if version == 2 else value for name, value in state.items()}
            dist.barrier()
            return {"state": state, "eval": loss, "history": torch.tensor(history)}
    finally:
        door.uninstall()
        sys.modules.update(taken)
        states.AcceleratorState._reset_state(True)


def test_its_own_plugins(tmp_path: Path) -> None:
    one = in_one_process(llama, tmp_path / "one", label_smoothing_factor=0.1)
    for version in (2, 1):
        for k, resume in enumerate((None, tmp_path / f"{version}0" / "checkpoint-2")):
            folder = tmp_path / f"{version}{k}"
            found = rank_pool(2).run(_by_its_own_plugin, free_port(), folder, resume, version)[0]
            close(found, one)
