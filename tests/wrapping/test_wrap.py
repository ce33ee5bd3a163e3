"""wrap, auto_wrap, enable_wrap beyond what fairscale can show: shared modules, threads, policies in torch's style."""

from __future__ import annotations

import functools
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as torch_by_size
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as torch_by_type

import shardkit.nn
from shardkit.errors import ConfigurationError, LifecycleError, ShardkitError
from shardkit.nn.auto_wrap import auto_wrap as old_path_auto_wrap
from shardkit.nn.wrap.auto_wrap import ConfigAutoWrap
from shardkit.nn.wrap.auto_wrap import enable_wrap as compat_enable_wrap
from shardkit.wrapping.context import auto_wrap, current_context, enable_wrap, wrap, wrap_tree
from shardkit.wrapping.policies import (
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Flattening(Wrapper):
    """Takes the parameters away from the module, as a sharding wrapper does."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        total = sum(p.numel() for p in module.parameters())
        for m in module.modules():
            for name in list(m._parameters):
                del m._parameters[name]
        self.flat = nn.Parameter(torch.zeros(total))


class Pair(nn.Module):
    def __init__(self, a: nn.Module, b: nn.Module, numel: int = 1) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.own = nn.Parameter(torch.zeros(numel))


def plain_name(name: str) -> str:
    """The name without the wrappers on the way."""
    return ".".join(part for part in name.split(".") if part != "module")


def wrapped_names(module: nn.Module) -> set[str]:
    named = module.named_modules(remove_duplicate=False)
    return {plain_name(name) for name, m in named if isinstance(m, Wrapper)}


at_least = functools.partial(functools.partial, default_auto_wrap_policy)


# ---------------------------------------------------------------------- the snippet of fairscale's documentation
def test_min_num_params_is_short_for_a_partial() -> None:
    def tree(**how: Any) -> set[str]:
        with enable_wrap(wrapper_cls=Wrapper):
            return wrapped_names(auto_wrap(Pair(nn.Linear(4, 4), nn.Linear(2, 2), 30), **how))

    assert tree(min_num_params=20) == tree(auto_wrap_policy=at_least(min_num_params=20)) == {"", "a"}
    # over the policy that was given, also if that has a threshold already
    only_pairs = at_least(min_num_params=1e9, exclude_wrap_modules={nn.Linear})
    assert tree(auto_wrap_policy=only_pairs, min_num_params=20) == {""}
    assert tree(auto_wrap_policy=size_based_auto_wrap_policy, min_num_params=20) == {"", "a"}
    with pytest.raises(ConfigurationError, match="min_num_params=3 "):
        tree(auto_wrap_policy=config_auto_wrap_policy, min_num_params=3)


def test_import_paths() -> None:
    from shardkit.nn import auto_wrap as by_package
    from shardkit.nn.wrap import auto_wrap as by_wrap

    assert callable(shardkit.nn.auto_wrap)
    assert callable(shardkit.nn.wrap)
    assert by_package is by_wrap is old_path_auto_wrap is auto_wrap


# ---------------------------------------------------------------------- shared modules and parameters
@pytest.mark.parametrize("wrapper", [Wrapper, Flattening])
def test_module_with_two_names_is_wrapped_once_different_parents(wrapper: Any) -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    questions: list[Any] = []

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        questions.append((module, recurse, unwrapped_params))
        return recurse or isinstance(module, (nn.Linear, nn.Sequential))

    left, right = Pair(shared, nn.ReLU(), 3), Pair(nn.ReLU(), shared, 5)
    root = Pair(left, right)
    with enable_wrap(wrapper_cls=wrapper):
        tree, count = wrap_tree(root, policy, {})
    assert tree is root
    assert isinstance(left.a, wrapper)
    assert left.a is right.b
    assert left.a.module is shared
    assert all(isinstance(m, wrapper) for m in shared)
    assert count == 40
    assert len([1 for m, _, _ in questions if m is shared]) == 2
    # what is left for the parents does not count the shared module twice, or miss it
    assert questions[-1] == (root, False, 9)
    assert (right, True, 45) in questions
    assert (right, False, 5) in questions


def test_tied_parameters_count_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    with enable_wrap(wrapper_cls=Wrapper):
        tree, count = wrap_tree(Pair(first, second, 15), at_least(min_num_params=15), {})
    assert wrapped_names(tree) == {"", "a", "b"}
    assert count == 31


# ---------------------------------------------------------------------- contexts
def test_nothing_happens_outside_of_a_block() -> None:
    module = nn.Linear(2, 2)
    assert wrap(module, a=1) is module
    assert auto_wrap(module, at_least(min_num_params=0), a=1) is module
    with pytest.raises(LifecycleError, match="enable_wrap"):
        wrap_tree(module, default_auto_wrap_policy, {})


@pytest.mark.parametrize("block", [enable_wrap, compat_enable_wrap, ConfigAutoWrap])
def test_state_is_restored_after_an_exception(block: Any) -> None:
    def fails(module: nn.Module, **_: Any) -> nn.Module:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError), block(wrapper_cls=fails):
            wrap(nn.ReLU())
        assert current_context() is None
        assert isinstance(wrap(nn.ReLU()), nn.ReLU)


def test_nested_blocks_are_refused_and_leave_the_outer_one() -> None:
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with (
            pytest.raises(NotImplementedError, match="inside of another") as error,
            enable_wrap(wrapper_cls=Wrapper),
        ):
            pass
        assert isinstance(error.value, ShardkitError)
        with pytest.raises(NotImplementedError), compat_enable_wrap():
            pass
        assert wrap(nn.ReLU()).kwargs == {"a": 1}
    with enable_wrap(wrapper_cls=Wrapper, a=2):  # and the next block is fine
        assert wrap(nn.ReLU()).kwargs == {"a": 2}


def test_missing_wrapper_class_leaves_no_block_open() -> None:
    with pytest.raises(AssertionError, match="wrapper_cls"), compat_enable_wrap(a=1):
        pass
    assert current_context() is None


def test_block_object_can_be_used_again() -> None:
    block = ConfigAutoWrap(wrapper_cls=Wrapper, a=1)
    for _ in range(2):
        with block:
            assert wrap(nn.ReLU()).kwargs == {"a": 1}


def test_threads_have_their_own_blocks() -> None:
    count = 4
    barrier = threading.Barrier(count, timeout=20)
    seen: dict[int, Any] = {}

    def replica(rank: int) -> None:
        barrier.wait()
        for step in range(20):
            with enable_wrap(wrapper_cls=Wrapper, rank=rank, step=step):
                barrier.wait()
                module = auto_wrap(nn.Sequential(nn.Linear(2, 2)), at_least(min_num_params=6))
                seen.setdefault(rank, []).append(module[0].kwargs if rank % 2 else wrap(nn.ReLU()).kwargs)
                barrier.wait()

    with enable_wrap(wrapper_cls=Wrapper, rank="main"):
        threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert wrap(nn.ReLU()).kwargs == {"rank": "main"}
    assert seen == {r: [{"rank": r, "step": s} for s in range(20)] for r in range(count)}


# ---------------------------------------------------------------------- what is wrapped already
def test_wrapped_modules_are_refused_by_name() -> None:
    with enable_wrap(wrapper_cls=Wrapper):
        tree = nn.Sequential(nn.Linear(2, 2), nn.Sequential(wrap(nn.Linear(2, 2))))
        with pytest.raises(AssertionError, match=r"1\.0 \(Sequential\) is wrapped in Wrapper already"):
            auto_wrap(tree, at_least(min_num_params=0))
        assert not isinstance(tree[0], Wrapper)
        # a single module may be wrapped again, as in fairscale
        assert isinstance(wrap(tree[1][0]).module, Wrapper)


def test_a_function_as_wrapper() -> None:
    with enable_wrap(wrapper_cls=lambda module, **kwargs: Wrapper(module, **kwargs), a=1):
        tree = auto_wrap(nn.Sequential(nn.Linear(2, 2)), at_least(min_num_params=6))
    assert tree[0].kwargs == {"a": 1}


# ---------------------------------------------------------------------- policies of every style
def tree_for(policy: Any) -> set[str]:
    with enable_wrap(wrapper_cls=Wrapper):
        return wrapped_names(
            auto_wrap(Pair(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.MultiheadAttention(4, 2)), policy)
        )


def without_root_flag(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
    return recurse or unwrapped_params == 20


class Old:
    def __call__(self, module: nn.Module, recurse: bool, **rest: Any) -> bool:
        assert rest.keys() == {"unwrapped_params", "module_is_root"}
        return recurse or isinstance(module, nn.Sequential)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}), {"a.0", "b.out_proj"}),
        (functools.partial(torch_by_type, transformer_layer_cls={nn.Sequential}), {"a"}),
        (functools.partial(torch_by_size, min_num_params=20), {"", "a.0"}),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=20), {"", "a.0"}),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.ReLU)), {"a.1"}),
        (ModuleWrapPolicy({nn.Linear, nn.Sequential}), {"a", "a.0", "b.out_proj"}),
        (CustomPolicy(lambda m: isinstance(m, (nn.ReLU, Pair))), {"", "a.1"}),
        (
            functools.partial(
                _or_policy,
                policies=[
                    ModuleWrapPolicy({nn.ReLU}),
                    functools.partial(torch_by_type, transformer_layer_cls={nn.Sequential}),
                ],
            ),
            {"a", "a.1"},
        ),
        (always_wrap_policy, {"", "a", "a.0", "a.1", "b", "b.out_proj"}),
        (without_root_flag, {"a.0", "b.out_proj"}),
        (Old(), {"a"}),
        (lambda module, recurse: True, {"", "a", "a.0", "a.1", "b", "b.out_proj"}),
    ],
)  # fmt: skip
def test_policies_of_other_libraries_and_of_older_versions(policy: Any, expected: set[str]) -> None:
    assert tree_for(policy) == expected


def test_arguments_set_by_a_policy_object() -> None:
    policy = CustomPolicy(lambda m: {"b": "policy", "c": "policy"} if isinstance(m, nn.Linear) else False)
    module = nn.Linear(2, 2)
    module.wrapper_config = {"c": "module"}  # type: ignore[assignment]
    with enable_wrap(policy, wrapper_cls=Wrapper, a="block", b="block"):
        tree = auto_wrap(nn.Sequential(module, nn.ReLU()))
    assert tree[0].kwargs == {"a": "block", "b": "policy", "c": "module"}
    assert isinstance(tree[1], nn.ReLU)


def test_something_that_is_no_policy() -> None:
    with enable_wrap(wrapper_cls=Wrapper), pytest.raises(ConfigurationError, match="auto_wrap_policy=7"):
        auto_wrap(nn.Linear(2, 2), 7)


def test_policies_can_be_pickled() -> None:
    policy = functools.partial(default_auto_wrap_policy, min_num_params=20)
    assert tree_for(pickle.loads(pickle.dumps(policy))) == tree_for(policy)


# ---------------------------------------------------------------------- properties
def nested(depth: int) -> Any:
    leaf = st.integers(1, 5).map(lambda n: lambda pool: nn.Linear(n, n))
    shared = st.integers(0, 2).map(lambda i: lambda pool: pool[i])
    inner = st.deferred(
        lambda: st.one_of(leaf, shared) if depth == 0 else st.one_of(leaf, shared, nested(depth - 1))
    )
    return st.lists(inner, min_size=1, max_size=4).map(
        lambda makers: lambda pool: nn.Sequential(*[m(pool) for m in makers])
    )


@settings(max_examples=100, deadline=None)
@given(make=nested(3), threshold=st.sampled_from([1, 2, 6, 12, 20, 30, 60, 100]))
def test_shared_modules_keep_their_wrappers_and_the_function(make: Any, threshold: int) -> None:
    torch.manual_seed(0)
    pool = [nn.Linear(3, 3), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.ReLU())]
    tree = make(pool)
    plain = [id(m) for m in tree.modules()]
    params = [id(p) for p in tree.parameters()]
    places = [n for n, _ in tree.named_modules(remove_duplicate=False)]
    with enable_wrap(wrapper_cls=Wrapper):
        wrapped, count = wrap_tree(tree, at_least(min_num_params=threshold), {})
    wrappers = [m for m in wrapped.modules() if isinstance(m, Wrapper)]
    assert sorted(id(m) for m in wrapped.modules() if not isinstance(m, Wrapper)) == sorted(plain)
    assert len({id(w.module) for w in wrappers}) == len(wrappers)  # one wrapper each
    inside = {w.module for w in wrappers}
    for m in wrapped.modules():
        if not isinstance(m, Wrapper):
            assert not any(child in inside for child in m.children())  # no name leads past the wrapper
    assert sorted(map(id, wrapped.parameters())) == sorted(params)
    now = {plain_name(n) for n, _ in wrapped.named_modules(remove_duplicate=False)}
    assert now == set(places)
    assert count == sum(p.numel() for p in {p for w in wrappers for p in w.parameters()})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_move_module_cuda_half() -> None:
    with compat_enable_wrap(wrapper_cls=Wrapper, move_module_cuda_half=True, a=1):
        layer = wrap(nn.Linear(2, 2))
    assert layer.kwargs == {"a": 1}
    assert layer.module.weight.dtype == torch.float16
    assert layer.module.weight.is_cuda
