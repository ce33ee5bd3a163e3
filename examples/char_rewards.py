"""A policy that writes words is trained by rewards; an inference engine writes, and gets what each step has changed.

The policy is sharded over the ranks, with shards of fp32 that are computed with in bf16. The engine is a program of its
own in practice; here it is an object of rank 0, with a whole model in bf16, and knows nothing of ranks::

    python examples/char_rewards.py --ranks 2 --steps 60
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit import Change, PrecisionPolicy, SentWeights, fully_shard, sharding_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
IS_VOWEL = torch.tensor([letter in "aeiou" for letter in LETTERS])
WORDS, LENGTH, SEEN = 256, 8, 3  # words a step, characters of a word, and how many the next one depends on


class Policy(nn.Module):
    """Gives logits of the next character after the last few, [n, SEEN]; 26 stands before a word."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(27, width)
        self.hidden = nn.Sequential(nn.Linear(SEEN * width, 4 * width), nn.Tanh())
        self.head = nn.Linear(4 * width, 26)

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(self.letters(last).flatten(1)))
        return out


class Engine:
    """Stands for an inference engine, which has its own copy of the weights.

    Attributes:
        received: bytes of the last update.
    """

    def __init__(self) -> None:
        self._model = Policy().bfloat16().requires_grad_(False)
        self._weights = dict(self._model.named_parameters())
        self.received = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | Change]]) -> None:
        """Takes what has changed in each tensor, and compares checksums."""
        self.received = 0
        for name, change in weights:
            if isinstance(change, Change):
                change.apply(self._weights[name])
            else:  # all of it: export() without since=
                self._weights[name].copy_(change)
            self.received += change.nbytes

    def write(self, count: int) -> torch.Tensor:
        """Returns so many words, [count, SEEN + LENGTH], with what stands before them."""
        words = torch.full((count, SEEN), 26)
        for _ in range(LENGTH):
            logits = self._model(words[:, -SEEN:]).float()
            words = torch.cat([words, torch.distributions.Categorical(logits=logits).sample()[:, None]], 1)
        return words


def rewards_of(words: torch.Tensor) -> torch.Tensor:
    """The share of neighbours of which one is a vowel and one is not, [n]."""
    vowels = IS_VOWEL[words[:, SEEN:]]
    return (vowels[:, 1:] != vowels[:, :-1]).float().mean(1)


def train(rank: int, steps: int, lr: float) -> list[tuple[float, int]]:
    """Returns the mean reward, and bytes that the engine got, of each step."""
    policy = Policy()
    precision = PrecisionPolicy(compute=torch.bfloat16)
    fully_shard(policy.hidden, precision=precision)
    fully_shard(policy, precision=precision)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    engine, sent, course = Engine(), SentWeights(), []
    torch.manual_seed(1)
    for _ in range(steps):
        changes = sharding_of(policy).export(dtype=torch.bfloat16, on=0, since=sent)
        engine.load_weights(changes)  # nothing comes on other ranks, which take part
        words = engine.write(WORDS) if rank == 0 else torch.empty(WORDS, SEEN + LENGTH, dtype=torch.int64)
        dist.broadcast(words, 0)
        rewards = rewards_of(words)
        gains = rewards - rewards.mean()  # over all ranks' words
        mine = slice(rank, None, dist.get_world_size())
        own = words[mine]
        windows = own.unfold(1, SEEN + 1, 1)  # of each character, with those that it depends on
        chances = policy(windows[..., :SEEN].reshape(-1, SEEN)).float().log_softmax(1)
        chosen = chances.gather(1, windows[..., SEEN].reshape(-1, 1)).view(len(own), LENGTH)
        loss = -(chosen.sum(1) * gains[mine]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        course.append((rewards.mean().item(), engine.received))
    return course


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    course = shardkit.launch(train, options.ranks, args=(options.steps, options.lr))[0]
    for step, (reward, received) in enumerate(course):
        if step in (0, len(course) - 1) or step % 10 == 0:
            print(f"step {step}: reward {reward:.2f}, {received} bytes to the engine")


if __name__ == "__main__":
    main()
