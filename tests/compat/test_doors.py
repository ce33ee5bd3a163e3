"""Classes of compat hold sharding state through the core's door, and define nothing that the core computes."""

from __future__ import annotations

import ast
import pathlib

import pytest
from torch import nn

import shardkit
from shardkit.fsdp.wrapper import Door
from shardkit.nn.data_parallel import FullyShardedDataParallel
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchsFSDP
from shardkit.xla.fsdp import XlaFullyShardedDataParallel

COMPAT = pathlib.Path(shardkit.__file__).parents[1] / "compat"
SAID_OTHERWISE = {
    "clip_grad_norm_",
    "load_state_dict",
    "module",
    "named_modules",
    "set_divisors",
    "state_dict",
    "summon_full_params",
}


def names_of(classes: set[type]) -> set[str]:
    return {
        name for c in classes for name in vars(c) if name in ("__getattr__",) or not name.startswith("__")
    }


def test_a_door_says_itself_what_is_inside_of_it() -> None:
    assert Door.__abstractmethods__ == {"module"}
    with pytest.raises(TypeError, match="abstract"):
        Door()  # type: ignore[abstract]


@pytest.mark.parametrize("door", [FullyShardedDataParallel, XlaFullyShardedDataParallel, TorchsFSDP])
def test_compat_defines_nothing_else_of_the_core(door: type[nn.Module]) -> None:
    core = set(Door.__mro__) - set(nn.Module.__mro__)
    above = set(door.__mro__) - set(Door.__mro__)
    assert all(c.__module__.startswith(("shardkit.nn", "shardkit.xla", "shardkit.torch_fsdp")) for c in above)
    # names that nn.Module has too are named where they differ: those of compat are about listing and text
    may_have = SAID_OTHERWISE | {"_sharded"}  # what a class does once its parameters are
    assert (names_of(above) & names_of(core)) - {"_abc_impl"} == may_have & names_of(above)


def test_compat_sets_no_attribute_of_the_state() -> None:
    """Options go to the core when a door is made; afterwards only the core writes to its state."""
    for path in COMPAT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                written = ast.unparse(node.value)
                assert written == "self" or "_state" not in written, f"{path}:{node.lineno}"
