"""A life of adapters: trained on frozen weights, sent out as they change, saved, gone on with by more ranks, merged.

LoRA of peft, beside one process that has all ranks' batches.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import Change, OffloadPolicy, ReshardPolicy, SentWeights, fully_shard, sharding_of
from tests.pools import rank_pool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs transformers and peft (extra: libraries)"
)
MICRO, WORDS = 2, 40


def _llama(seed: int, several: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 36, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    )
    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(llama, lora)
    if several:
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.0))
    return model


def _optimizers(kind: str, model: Any, plain: Any) -> list[torch.optim.Optimizer]:
    """Of the ranks' model, and those of one process."""
    if kind == "adamw":
        return [
            torch.optim.AdamW([p for n, p in m.named_parameters() if "lora_" in n], lr=1e-2, eps=1e-3)
            for m in (model, plain)
        ]
    matrices, others = ([p for p in plain.parameters() if (p.ndim == 2) is want] for want in (True, False))
    whole = shardkit.WholeParameters(model, torch.optim.Muon, lr=1e-2)
    return [whole, torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others)]


class Run:
    """A sharded model, its receiver, and one process beside."""

    def __init__(self, rank: int, seed: int, door: str, frozen: Any, kind: str) -> None:
        self.rank, self.kind, self.ranks = rank, kind, torch.distributed.get_world_size()
        # so that rounding is nothing; what is packed is of at most fp32
        self.dtype, self.near = (torch.float32, 1e-4) if frozen == "packed" else (torch.float64, 1e-6)
        # an adapter that is not in use is frozen, and would be packed
        self.plain, self.model = (_llama(seed, frozen != "packed").to(self.dtype) for _ in range(2))
        options: dict[str, Any] = {
            "reshard": ReshardPolicy(frozen=frozen),
            "offload": OffloadPolicy(masters=kind != "muon", activations=True),
            "dtensors": door == "dtensors",
        }
        for layer in self.model.base_model.model.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.sharding = sharding_of(self.model)
        # packed weights were rounded
        self.plain.load_state_dict({n: v.clone() for n, v in self.sharding.export()})
        self.optimizer, *self.truths = _optimizers(kind, self.model, self.plain)
        self.sent, self.engine = SentWeights(), dict[str, torch.Tensor]()

    def train(self, steps: Any) -> None:
        for step in steps:
            norms = []
            for k in range(MICRO):
                words = [self.words(step, k, r) for r in range(self.ranks)]
                with self.sharding.no_sync() if k < MICRO - 1 else contextlib.nullcontext():
                    self.loss(self.model, words[self.rank]).backward()
                for each in words:
                    (self.loss(self.plain, each) / self.ranks).backward()
            norms.append(self.sharding.clip_grad_norm_(0.5))
            norms.append(nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5))
            torch.testing.assert_close(float(norms[0]), float(norms[1]), rtol=self.near, atol=self.near)
            for optimizer in (self.optimizer, *self.truths):
                optimizer.step()
                optimizer.zero_grad()
            self.send()

    def words(self, step: int, k: int, rank: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * step + 10 * k + rank)
        return torch.randint(WORDS, (2, 7), generator=draw)

    def loss(self, model: Any, words: torch.Tensor) -> torch.Tensor:
        return model(input_ids=words, labels=words).loss / MICRO  # type: ignore[no-any-return]

    def send(self) -> None:
        """The receiver has what the ranks have, to the bit, and that is what one process has."""
        for name, change in self.sharding.export(on=0, since=self.sent):
            if isinstance(change, Change):
                if name not in self.engine:
                    self.engine[name] = torch.zeros(change.shape, dtype=change.dtype)
                change.apply(self.engine[name])
        self.compare()

    def compare(self) -> None:
        whole = {n: v.clone() for n, v in self.sharding.export()}
        torch.testing.assert_close(whole, dict(self.plain.state_dict()), rtol=self.near, atol=self.near)
        if self.rank == 0 and self.engine:
            params = {n for n, _ in self.plain.named_parameters()}
            torch.testing.assert_close(
                self.engine, {n: v for n, v in whole.items() if n in params}, rtol=0, atol=0
            )


def _first(rank: int, folder: str, door: str, frozen: Any, kind: str) -> None:
    run = Run(rank, 0, door, frozen, kind)
    run.train(range(2))
    with run.model.disable_adapter(), torch.no_grad():
        words = run.words(7, 0, 0)
        with run.plain.disable_adapter():
            torch.testing.assert_close(
                run.loss(run.model, words), run.loss(run.plain, words), rtol=run.near, atol=run.near
            )
    run.train(range(2, 3))
    for adapter in ("other", "default") if frozen != "packed" else ():
        for model in (run.model, run.plain):
            model.set_adapter(adapter)
        run.train(range(8, 9))
    shardkit.save_training(folder, step=3, model=run.model, optimizer=run.optimizer)
    torch.save([run.plain.state_dict(), *(o.state_dict() for o in run.truths)], f"{folder}/truth{rank}.pt")


def _then(rank: int, folder: str, door: str, frozen: Any, kind: str) -> None:
    run = Run(rank, 1, door, frozen, kind)
    restored = shardkit.restore_training(folder, model=run.model, optimizer=run.optimizer)
    assert restored.step == 3
    plain, *states = torch.load(f"{folder}/truth0.pt")
    run.plain.load_state_dict(plain)
    for optimizer, state in zip(run.truths, states, strict=True):
        optimizer.load_state_dict(state)
    run.compare()
    run.train(range(3, 5))
    unfreeze(run, lambda n: "norm" in n or ("layers.1" in n and "lora" not in n and frozen != "packed"))
    run.train(range(5, 7))
    x = run.words(9, 0, 0)
    with run.sharding.summon_full_params():
        run.model.merge_adapter()
    run.plain.merge_adapter()
    with torch.no_grad():
        if frozen != "packed":
            torch.testing.assert_close(
                run.loss(run.model, x), run.loss(run.plain, x), rtol=run.near, atol=run.near
            )
            run.send()
    with run.sharding.summon_full_params():
        run.model.unmerge_adapter()
    run.plain.unmerge_adapter()
    if frozen != "packed":
        run.train(range(7, 8))
    # what was frozen is not trained any more, and adapters are gone
    with run.sharding.summon_full_params():
        run.model.merge_and_unload()
    truth = {n.replace(".base_layer", ""): p for n, p in run.plain.named_parameters() if "lora_" not in n}
    run.plain.merge_and_unload()
    if frozen == "packed":
        truth = {n: p for n, p in truth.items() if "norm" in n}  # others were rounded when they were merged
    else:
        with torch.no_grad():
            torch.testing.assert_close(
                run.loss(run.model, x), run.loss(run.plain, x), rtol=run.near, atol=run.near
            )
    whole = {n: v.clone() for n, v in run.sharding.export() if n in truth}
    torch.testing.assert_close(whole, {n: p.data for n, p in truth.items()}, rtol=run.near, atol=run.near)


def unfreeze(run: Run, which: Callable[[str], bool]) -> None:
    for model in (run.model, run.plain):
        for name, p in model.named_parameters():
            if which(name):
                p.requires_grad_(True)
    if run.kind == "muon":
        return
    for model, optimizer in ((run.model, run.optimizer), (run.plain, run.truths[0])):
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        optimizer.add_param_group({"params": new})


@pytest.mark.parametrize(
    ("door", "frozen", "kind"),
    [
        ("fully_shard", "keep", "adamw"),
        ("dtensors", "packed", "adamw"),
        ("fully_shard", "packed", "muon"),
        ("dtensors", "host", "muon"),
    ],
)
def test_a_life_of_adapters(tmp_path: Path, door: str, frozen: str, kind: str) -> None:
    rank_pool(2).run(_first, str(tmp_path), door, frozen, kind)
    rank_pool(3).run(_then, str(tmp_path), door, frozen, kind)
