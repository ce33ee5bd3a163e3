"""wrap against the real fairscale: both wrap the same drawn tree of modules in the same class, in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # comes in at some first use, with an environment variable that fixtures notice
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardkit.nn.wrap.auto_wrap import ConfigAutoWrap as OurConfig
from shardkit.nn.wrap.auto_wrap import (
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from tests.differential.keeping import kept
from tests.programs.running import examples

fairscale_wrap = pytest.importorskip("fairscale.nn.wrap.auto_wrap")

pytestmark = pytest.mark.oracle


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


class Block(nn.Module):
    """Parameters of its own next to children."""

    def __init__(self, numel: int, children: list[nn.Module]) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(numel))
        for i, child in enumerate(children):
            setattr(self, f"part{i}", child)
        self.missing = None


class Ours:
    config = OurConfig
    enable_wrap, wrap, auto_wrap = staticmethod(enable_wrap), staticmethod(wrap), staticmethod(auto_wrap)
    by_size, by_config = staticmethod(default_auto_wrap_policy), staticmethod(config_auto_wrap_policy)


class Theirs:
    config = fairscale_wrap.ConfigAutoWrap
    enable_wrap, wrap = staticmethod(fairscale_wrap.enable_wrap), staticmethod(fairscale_wrap.wrap)
    auto_wrap = staticmethod(fairscale_wrap.auto_wrap)
    by_size = staticmethod(fairscale_wrap.default_auto_wrap_policy)
    by_config = staticmethod(fairscale_wrap.config_auto_wrap_policy)


# ---------------------------------------------------------------------- drawn trees
LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: nn.Linear(n, n),
    "embedding": lambda n: nn.Embedding(n, 3),
    "norm": lambda n: nn.BatchNorm1d(n),
    "relu": lambda n: nn.ReLU(),
    "attention": lambda n: nn.MultiheadAttention(2 * n, 2),
    "encoder": lambda n: nn.TransformerEncoderLayer(2 * n, 2, dim_feedforward=3 * n),
    "decoder": lambda n: nn.TransformerDecoderLayer(2 * n, 2, dim_feedforward=3 * n),
}
CONTAINERS: dict[str, Callable[[int, list[nn.Module]], nn.Module]] = {
    "sequential": lambda n, c: nn.Sequential(*c),
    "list": lambda n, c: nn.ModuleList(c),
    "dict": lambda n, c: nn.ModuleDict({f"key{i}": m for i, m in enumerate(c)}),
    "block": Block,
}
arguments = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=2)
configs = st.one_of(st.none(), st.none(), arguments)
sizes = st.integers(1, 8)
trees = st.recursive(
    st.tuples(st.sampled_from(sorted(LEAVES)), sizes, st.just(()), configs),
    lambda children: st.tuples(
        st.sampled_from(sorted(CONTAINERS)), sizes, st.lists(children, max_size=4).map(tuple), configs
    ),
    max_leaves=10,
)
policies = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"kind": st.just("size"), "min_num_params": st.sampled_from([0, 1, 5, 10, 20, 40, 80, 150, 400])},
        optional={
            "force_leaf_modules": st.sets(st.sampled_from(["Sequential", "MultiheadAttention", "Block"])),
            "exclude_wrap_modules": st.sets(st.sampled_from(["Linear", "ModuleList", "Sequential"])),
            "skip_params_check_for_root": st.booleans(),
        },
    ),
    st.just({"kind": "config"}),
    st.integers(0, 1 << 16).map(lambda salt: {"kind": "arbitrary", "salt": salt}),
)


def build(recipe: Any) -> nn.Module:
    kind, numel, children, config = recipe
    parts = [build(c) for c in children]
    module = LEAVES[kind](numel) if kind in LEAVES else CONTAINERS[kind](numel, parts)
    if config is not None:
        module.wrapper_config = dict(config)  # type: ignore[assignment]
    return module


def _type(name: str) -> type[nn.Module]:
    return Block if name == "Block" else getattr(nn, name)


def policy_of(library: Any, drawn: Any, calls: list[Any]) -> Any:
    """The drawn policy, noting every question that it is asked."""
    if drawn is None:
        return None
    options = {k: {_type(n) for n in v} if isinstance(v, set) else v for k, v in drawn.items()}
    kind = options.pop("kind")
    decide = {"size": library.by_size, "config": library.by_config}.get(kind)

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        question = (type(module).__name__, recurse, unwrapped_params, module_is_root)
        if decide is None:
            answer = bool(
                (sum(map(ord, question[0])) * 31 + unwrapped_params * 7 + options["salt"]) % 3 or recurse
            )
        else:
            answer = decide(
                module=module,
                recurse=recurse,
                unwrapped_params=unwrapped_params,
                module_is_root=module_is_root,
                **options,
            )
        calls.append((*question, answer))
        return answer

    return policy


def described(module: nn.Module) -> list[Any]:
    return [
        (name, type(m).__name__, m.kwargs if isinstance(m, Wrapper) else None)
        for name, m in module.named_modules(remove_duplicate=False)
    ]


def outcome(library: Any, recipe: Any, case: dict[str, Any]) -> Any:
    calls: list[Any] = []
    root = build(recipe)
    in_context = policy_of(library, case["context_policy"], calls)
    in_call = policy_of(library, case["call_policy"], calls)
    try:
        with library.enable_wrap(in_context, wrapper_cls=Wrapper, **case["context"]):
            for how in case["calls"]:
                if how == "wrap":
                    root = library.wrap(root, **case["overrides"])
                elif how == "auto_wrap":
                    root = library.auto_wrap(root, in_call, **case["overrides"])
                else:
                    root, count = library.config.recursive_wrap(
                        root, in_call, how == "root", **case["overrides"]
                    )
                    calls.append(count)
        error = None
    except Exception as e:
        error = e
    assert not library.config.in_autowrap_context
    return described(root), calls, error


@examples(300)
@given(
    recipe=trees,
    case=st.fixed_dictionaries(
        {
            "context_policy": policies,
            "call_policy": policies,
            "context": arguments,
            "overrides": arguments,
            "calls": st.lists(
                st.sampled_from(["auto_wrap", "auto_wrap", "wrap", "root", "not root"]),
                min_size=1,
                max_size=2,
            ),
        }
    ),
)
def test_same_tree_same_arguments_same_questions(recipe: Any, case: dict[str, Any]) -> None:
    check_trees(recipe, case)


@kept
def check_trees(recipe: Any, case: dict[str, Any]) -> None:
    with torch.device("meta"):
        tree, calls, error = outcome(Ours, recipe, case)
        expected_tree, expected_calls, expected_error = outcome(Theirs, recipe, case)
    if expected_error is None:
        assert error is None
    else:
        assert isinstance(error, type(expected_error))
    assert tree == expected_tree
    assert calls == expected_calls


@pytest.mark.parametrize("config", [None, 3, [("a", 1)]])
@pytest.mark.parametrize("how", ["wrap", "auto_wrap"])
def test_wrapper_config_that_is_no_dict(config: Any, how: str) -> None:
    for library in (Ours, Theirs):
        module = nn.Linear(2, 2)
        module.wrapper_config = config
        with library.enable_wrap(library.by_config, wrapper_cls=Wrapper), pytest.raises(AssertionError):
            getattr(library, how)(module)


def test_attributes_of_config_auto_wrap() -> None:
    def policy(**_: Any) -> bool:
        return True

    def shown(config: Any) -> list[Any]:
        names = ["in_autowrap_context", "move_module_cuda_half", "wrapper_cls", "kwargs", "auto_wrap_policy"]
        return [getattr(config, name) for name in names]

    for _ in range(2):
        assert shown(Ours.config) == shown(Theirs.config)
        for library in (Ours, Theirs):
            given_kwargs = {"wrapper_cls": Wrapper, "move_module_cuda_half": True, "a": 3}
            library.config.enable_autowrap_context(policy, given_kwargs)
        assert shown(Ours.config) == shown(Theirs.config)
        for library in (Ours, Theirs):
            library.config.disable_autowrap_context()


def test_default_types_can_be_changed_in_place() -> None:
    def tree_of(library: Any) -> list[Any]:
        policy = library.by_size
        policy.EXCLUDE_WRAP_MODULES.add(nn.Linear)
        policy.FORCE_LEAF_MODULES.add(nn.Sequential)
        try:
            with library.enable_wrap(functools.partial(policy, min_num_params=1), wrapper_cls=Wrapper):
                return described(
                    library.auto_wrap(
                        Block(2, [nn.Sequential(nn.LayerNorm(2)), nn.Linear(2, 2), nn.LayerNorm(2)])
                    )
                )
        finally:
            policy.EXCLUDE_WRAP_MODULES.discard(nn.Linear)
            policy.FORCE_LEAF_MODULES.discard(nn.Sequential)

    assert default_auto_wrap_policy.EXCLUDE_WRAP_MODULES == Theirs.by_size.EXCLUDE_WRAP_MODULES
    assert default_auto_wrap_policy.FORCE_LEAF_MODULES == Theirs.by_size.FORCE_LEAF_MODULES
    assert tree_of(Ours) == tree_of(Theirs)
