"""The host's global random generators, which ranks that share a process hand to each other."""

from __future__ import annotations

import random
import sys

import torch

from shardkit.types import Tree

HostRandomStates = tuple[
    torch.Tensor, tuple[object, ...], Tree
]  # of torch, random, numpy (None if not imported)


def host_random_states() -> HostRandomStates:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_random_states(states: HostRandomStates) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
