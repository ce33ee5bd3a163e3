"""FlattenParamsWrapper and checkpoint_wrapper against the real fairscale, in one process: names, states, gradients."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.nn.misc.flatten_params_wrapper import FlattenParamsWrapper as Ours
from tests.beside import reread

Theirs = pytest.importorskip("fairscale.nn.misc.flatten_params_wrapper").FlattenParamsWrapper
their_checkpoint = pytest.importorskip("fairscale.nn").checkpoint_wrapper

pytestmark = pytest.mark.oracle


class Block(nn.Module):
    """Parameters of its own, a buffer, and children; one of them perhaps under a second name."""

    def __init__(self, children: list[nn.Module], again: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(3))
        for i, child in enumerate(children):
            setattr(self, f"part{i}", child)
        self.again = children[0] if again and children else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in (m for m in self._modules.values() if m is not None):
            x = child(x)
        return x * self.scale + self.offset


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> nn.Module:
    children: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 3))):
        if depth and draw(st.booleans()):
            children.append(draw(trees(depth - 1)))
        else:
            children.append(draw(st.sampled_from([nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()])))
    tree = Block([copy.deepcopy(c) for c in children], draw(st.booleans()))
    layers = [m for m in tree.modules() if isinstance(m, nn.Linear)]
    if layers and draw(st.booleans()):
        layers[-1].weight = layers[0].weight
    return tree


@st.composite
def arguments(draw: st.DrawFn, model: nn.Module) -> tuple[list[list[int]] | None, list[str] | None]:
    """Groups of parameters by index, and names."""
    count = len(list(model.parameters()))
    if draw(st.booleans()):
        return None, draw(st.sampled_from([None, ["all"]]))
    groups: list[list[int]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for i in range(count):
        choice = draw(st.integers(0, len(groups)))
        if choice < len(groups):
            groups[choice].append(i)
    names = [f"n{i}" for i, g in enumerate(groups) if g]
    return groups, draw(st.sampled_from([None, names]))


def build(
    wrapper: Any, model: nn.Module, how: tuple[list[list[int]] | None, list[str] | None]
) -> tuple[Any, nn.Module]:
    model = copy.deepcopy(model)
    params = list(model.parameters())
    groups = None if how[0] is None else [[params[i] for i in group] for group in how[0]]
    return wrapper(model, groups, how[1]), model


def entries(state: dict[str, torch.Tensor]) -> list[tuple[str, Any]]:
    return [(name, value.tolist()) for name, value in state.items()]


@settings(max_examples=80, deadline=None)
@given(trees(), st.data())
def test_names_states_and_gradients_are_fairscales(model: nn.Module, data: st.DataObject) -> None:
    how = data.draw(arguments(model))
    (ours, our_module), (theirs, their_module) = (build(w, model, how) for w in (Ours, Theirs))
    for attribute in ("num_params_managed", "is_flattened", "flat_param_names"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in theirs.named_buffers()]
    for i in range(len(theirs.flat_params)):
        assert ours.metadata(i) == theirs.metadata(i)
    assert [(a, b) for a, _, b in ours._param_infos] == [(a, b) for a, _, b in theirs._param_infos]
    assert [(a, b, c, d) for a, b, _, c, _, d in ours._shared_param_infos] == [
        (a, b, c, d) for a, b, _, c, _, d in theirs._shared_param_infos
    ]
    # Dicts in fairscale's order: first as built, then after parameters have been taken out and put back.
    for _ in range(2):
        assert entries(ours.state_dict()) == entries(theirs.state_dict())
        assert entries(ours.flat_state_dict(prefix="x.")) == entries(theirs.flat_state_dict(prefix="x."))
    with ours.unflatten_params(), theirs.unflatten_params():
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    x = torch.randn(2, 3)
    for _ in range(2):
        outputs = [m(x) for m in (ours, theirs)]
        assert torch.equal(*outputs)
        for out in outputs:
            if out.requires_grad:
                out.square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)
    for name in vars(our_module):
        assert name in vars(their_module), "attributes that the wrapped module gets"


@settings(max_examples=40, deadline=None)
@given(trees(), st.data())
def test_states_go_from_one_to_the_other(model: nn.Module, data: st.DataObject) -> None:
    how = data.draw(arguments(model))
    for source, target in ((Ours, Theirs), (Theirs, Ours)):
        written, read = build(source, model, how)[0], build(target, model, how)[0]
        for flat in (False, True):
            with torch.no_grad():
                for p in (*written.parameters(), *written.buffers()):
                    p.normal_()
            state = written.flat_state_dict() if flat else written.state_dict()
            read.load_state_dict(reread(state))
            assert entries(read.state_dict()) == entries(written.state_dict())


class _FromFairscale(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module.replace("fairscale.", "shardkit.", 1), name)


def test_a_pickle_of_fairscales_opens_as_ours() -> None:
    model = Block([nn.Linear(3, 3), nn.LayerNorm(3)], again=True)
    theirs = Theirs(model)
    ours = _FromFairscale(io.BytesIO(pickle.dumps(theirs))).load()
    assert type(ours) is Ours
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), theirs(x))
    for state in (theirs.state_dict(), theirs.flat_state_dict()):
        ours.load_state_dict(state)
        assert entries(ours.state_dict()) == entries(theirs.state_dict())
    nn.Sequential(ours).load_state_dict(nn.Sequential(theirs).state_dict())
    assert entries(copy.deepcopy(ours).state_dict()) == entries(theirs.state_dict())
