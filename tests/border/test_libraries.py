"""Today's libraries with sharded models: transformers, peft, accelerate, each as its users do it.

Models are made from small configurations; nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import FSDP, OSS, ShardedDDP, fully_shard
from shardkit.errors import ConfigurationError, LifecycleError
from tests.beside import batch, steps_beside
from tests.border.test_wrappers import plain, units
from tests.pools import on_ranks

for library in ("transformers", "peft", "accelerate"):
    pytest.importorskip(
        library, reason="libraries of the extra 'libraries' are tested where they are installed"
    )


def llama(**options: Any) -> Any:
    """Two layers; the head is tied to the embedding if asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, **options))


def adapted() -> Any:
    """With adapters that do something."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.1)
    return model


def sharded(model: Any, nested: bool = True, flatten: bool = True) -> FSDP:
    """Each layer a unit, or all in one."""
    if nested:
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for k in range(len(layers)):
            layers[k] = FSDP(layers[k], flatten=flatten)
    return FSDP(model, flatten=flatten)


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randint(3, 33, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def gap(state: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest difference; names have to agree."""
    assert list(state) == list(truth)
    return max(float((state[n] - v).abs().max()) for n, v in truth.items())


def trainable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: Any, truth: Any, rank: int, world: int) -> None:
    """Two steps of each."""
    steps_beside(
        rank, world, model, truth, lambda m, r, step: m(tokens(r, step), labels=tokens(r, step)).loss,
        [trainable(model), trainable(truth)], range(2),
    )  # fmt: skip


LAYOUTS = [(True, True), (False, True), (True, False)]


# ------------------------------------------------------------------------------------ transformers
@pytest.mark.parametrize(("nested", "flatten"), LAYOUTS)
@on_ranks(1, 2)
def test_transformers(rank: int, world_size: int, nested: bool, flatten: bool, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model, truth = sharded(llama(), nested, flatten), llama()
    model.gradient_checkpointing_enable()
    model.train()
    train(model, truth, rank, world_size)
    model.save_pretrained(tmp_path)
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert gap(again.state_dict(), truth.state_dict()) <= 1e-6
    inner: Any = model.module
    assert (inner.dtype, inner.device.type) == (torch.float32, "cpu")
    if flatten:
        assert inner.num_parameters() == truth.num_parameters()
    model.eval()
    mine = model.generate(tokens(0), max_new_tokens=4, do_sample=False)
    assert torch.equal(mine, truth.eval().generate(tokens(0), max_new_tokens=4, do_sample=False))
    with pytest.raises(ConfigurationError, match="before it is wrapped"):
        model.set_input_embeddings(nn.Embedding(40, 16))


@on_ranks(2)
def test_a_model_that_asks_for_its_dtype(rank: int) -> None:
    from transformers import XLNetConfig, XLNetModel

    def make() -> Any:
        torch.manual_seed(0)
        return XLNetModel(XLNetConfig(vocab_size=33, d_model=16, n_layer=2, n_head=2, d_inner=23, dropout=0))

    outputs = FSDP(make())(tokens(rank)).last_hidden_state  # asks for its own dtype
    torch.testing.assert_close(outputs, make()(tokens(rank)).last_hidden_state, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ peft
@pytest.mark.parametrize(("nested", "flatten"), LAYOUTS)
@on_ranks(1, 2)
def test_peft(rank: int, world_size: int, nested: bool, flatten: bool, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    model, truth = sharded(adapted(), nested, flatten), adapted()
    train(model, truth, rank, world_size)
    expected = get_peft_model_state_dict(truth)
    found = get_peft_model_state_dict(model.module, state_dict=model.state_dict())
    assert gap(found, expected) <= 1e-6
    where = tmp_path / str(rank)
    model.save_pretrained(where)
    again = PeftModel.from_pretrained(llama(), where)
    assert gap(get_peft_model_state_dict(again), expected) <= 1e-6
    with model.disable_adapter(), truth.disable_adapter():
        mine = model(input_ids=tokens(rank)).logits
        torch.testing.assert_close(mine, truth(input_ids=tokens(rank)).logits, rtol=0, atol=1e-5)
    model.eval()
    mine = model.generate(input_ids=tokens(0), max_new_tokens=3, do_sample=False)
    assert torch.equal(mine, truth.eval().generate(input_ids=tokens(0), max_new_tokens=3, do_sample=False))
    with pytest.raises(ConfigurationError, match="before it is wrapped"):
        get_peft_model(sharded(llama(), nested, flatten), LoraConfig(r=3, target_modules=["q_proj"]))


@pytest.mark.parametrize(("nested", "flatten"), LAYOUTS)
@on_ranks(2)
def test_adapters_of_wrapped_models(
    rank: int, world_size: int, nested: bool, flatten: bool, tmp_path: Path
) -> None:
    """Read, written, merged, loaded, after wrapping."""
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

    model, truth = sharded(adapted(), nested, flatten), adapted()
    changed = {n: v + 1 for n, v in get_peft_model_state_dict(truth).items()}
    with pytest.raises(ConfigurationError, match=r"model\.module, state_dict=model\.state_dict\(\)"):
        get_peft_model_state_dict(model)
    with pytest.raises(ConfigurationError, match=r"with model\.summon_full_params"):
        set_peft_model_state_dict(model, changed)
    with model.summon_full_params():
        set_peft_model_state_dict(model.module, changed)
    found = get_peft_model_state_dict(model.module, state_dict=model.state_dict())
    assert gap(found, changed) == 0
    set_peft_model_state_dict(truth, changed)
    if world_size > 1:  # else values are there
        for method in ("merge_adapter", "merge_and_unload"):
            with pytest.raises(LifecycleError, match="summon_full_params"):
                getattr(model, method)()
        assert gap(model.state_dict(), truth.state_dict()) == 0
    with model.summon_full_params():
        model.module.merge_adapter()  # type: ignore[operator]
    truth.merge_adapter()
    assert gap(model.state_dict(), truth.state_dict()) <= 1e-6
    mine = model(input_ids=tokens(rank)).logits
    torch.testing.assert_close(mine, truth(input_ids=tokens(rank)).logits, rtol=0, atol=1e-5)
    with pytest.raises(ConfigurationError, match="before it is wrapped"):
        model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"]))
    other = adapted()
    other.save_pretrained(tmp_path / str(rank))
    with model.summon_full_params():
        model.module.unmerge_adapter()  # type: ignore[operator]
        model.module.load_adapter(tmp_path / str(rank), adapter_name="default")  # type: ignore[operator]
    found = get_peft_model_state_dict(model.module, state_dict=model.state_dict())
    assert gap(found, get_peft_model_state_dict(other)) == 0


# ------------------------------------------------------------------------------------ accelerate
class Environment:
    """What a launcher sets; libraries read it."""

    def __init__(self, rank: int, port: int) -> None:
        world = dist.get_world_size()
        self._new = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "1",
            "ACCELERATE_USE_CPU": "1",
        }

    def __enter__(self) -> None:
        self._old = dict(os.environ)
        os.environ.update(self._new)

    def __exit__(self, *error: Any) -> None:
        os.environ.clear()
        os.environ.update(self._old)


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)


def _trainees(strategy: str, accelerator: Any) -> tuple[Any, Any]:
    """Model and optimizer, prepared."""
    if strategy == "sharded_ddp":
        inner = plain()
        optimizer: torch.optim.Optimizer = OSS(inner.parameters(), torch.optim.AdamW, lr=0.1)
        model: nn.Module = ShardedDDP(inner, optimizer)  # type: ignore[arg-type]
    else:
        model = fully_shard(plain()) if strategy == "in_place" else units()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    assert prepared is model
    return prepared, wrapped


def _all_inputs(world: int) -> torch.utils.data.TensorDataset:
    """8 batches a rank, so that the prepared loader gives rank r batches r, r + world, ..."""
    return torch.utils.data.TensorDataset(torch.cat([batch(k, 0, 4, 5) for k in range(8 * world)]))


@pytest.mark.parametrize("strategy", ["fsdp", "in_place", "sharded_ddp"])
@on_ranks(1, 2)
def test_accelerate(rank: int, world_size: int, strategy: str, port: int, tmp_path: Path) -> None:
    """A loop as in accelerate's guide, beside one process."""
    with Environment(rank, port):
        accelerator = _accelerator(gradient_accumulation_steps=2)
        model, optimizer = _trainees(strategy, accelerator)
        loader = accelerator.prepare(torch.utils.data.DataLoader(_all_inputs(world_size), batch_size=4))
        truth = plain()
        truth_optimizer = torch.optim.AdamW(truth.parameters(), lr=0.1)
        for k, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(x).pow(2).sum()
                accelerator.backward(loss)
                losses = [
                    truth(batch(k * world_size + r, 0, 4, 5)).pow(2).sum() / 2 for r in range(world_size)
                ]
                torch.stack(losses).mean().backward()
                expected = torch.stack(losses).detach().mean() * 2
                found = accelerator.gather_for_metrics(loss.detach()).mean()
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    expected = nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
                    torch.testing.assert_close(torch.as_tensor(norm), expected, rtol=1e-4, atol=1e-5)
                    truth_optimizer.step()
                    truth_optimizer.zero_grad()
                optimizer.step()
                optimizer.zero_grad()
            if k == 3:
                if strategy == "sharded_ddp":
                    optimizer.optimizer.consolidate_state_dict(-1)
                # safetensors takes no parts of a buffer, which are what OSS makes of parameters
                accelerator.save_state(str(tmp_path), safe_serialization=strategy != "sharded_ddp")
                saved = {n: v.clone() for n, v in truth.state_dict().items()}
        prefix = "module." if strategy == "sharded_ddp" else ""
        for found in (accelerator.get_state_dict(model), accelerator.unwrap_model(model).state_dict()):
            assert gap({n.removeprefix(prefix): v for n, v in found.items()}, truth.state_dict()) <= 1e-5
        accelerator.wait_for_everyone()
        accelerator.load_state(str(tmp_path))
        found = {n.removeprefix(prefix): v for n, v in model.state_dict().items()}
        assert gap(found, saved) <= 1e-5
        accelerator.backward(model(batch(rank, 1, 4, 5)).pow(2).sum())
        if strategy == "sharded_ddp" or world_size == 1:
            optimizer.step()
        else:  # the file has rank 0's shards only
            with pytest.raises(ConfigurationError, match="rank 1 has loaded optimizer state of rank 0"):
                optimizer.step()
        _accelerator()


@on_ranks(2)
def test_accelerate_with_mixed_precision(rank: int, port: int) -> None:
    """Accelerate's own has to be put into forward, which prepare_model does."""
    with Environment(rank, port):
        accelerator = _accelerator(mixed_precision="bf16")
        for strategy in ("fsdp", "sharded_ddp"):
            with pytest.raises(ConfigurationError, match=r"PrecisionPolicy.*prepare_model"):
                _trainees(strategy, accelerator)
        model = accelerator.prepare_model(units(), evaluation_mode=True)
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain()(batch(rank, 0, 4, 5))
        mine = model(batch(rank, 0, 4, 5))
        assert expected.dtype == torch.bfloat16
        assert torch.equal(mine, expected.float())
        _accelerator()
