"""docs/api.md has every name of the public faces, and their docstrings say what they do and raise."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
# Modules that users import from. ``shardkit.integrations`` import their frameworks, and are named on the page by hand.
FACES = [
    "shardkit", *(f"shardkit.{name}" for name in (
        "activations", "checkpoint.tools", "evaluation", "extra.gossip", "model_parallel", "moe", "pipeline", "testing",
        "tools.estimate", "tools.rehearsal", "torch_fsdp", "torch_fsdp.sharded_grad_scaler", "torch_fsdp.state_dict",
        "torch_fsdp.wrap", "training.data", "wrapping",
    )),
]  # fmt: skip
# A path of fairscale's has fairscale's names too, which are not repeated on the page.
SERVED_BY_COMPAT = {
    "shardkit.extra.gossip": [
        "GossipOptions",
        "Nodes",
        "SlowMoBaseAlgorithm",
        "SlowMoDataParallel",
        "SlowMomentumOptions",
    ]
}
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   :.*\n(?:    .*\n)*)*)", re.M)


def found_at(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module or "shardkit"), attribute)


@lru_cache(maxsize=1)
def documented() -> dict[int, object]:
    """What the page's directives document, by id."""
    found: list[object] = []
    for kind, name, options in DIRECTIVE.findall(PAGE):
        if kind != "module":
            found.append(found_at(name))
            continue
        module = importlib.import_module(name)
        chosen = re.search(r":members: (\w[\w, \n]*)", options)
        names = re.findall(r"\w+", chosen[1]) if chosen else getattr(module, "__all__", None)
        if names is None:
            names = [
                n for n, v in vars(module).items() if getattr(v, "__module__", "") == name and n[0] != "_"
            ]
        found += [getattr(module, n) for n in names]
    return {id(each): each for each in found}


def is_ours(value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("shardkit")


@pytest.mark.parametrize("face", FACES)
def test_every_name_is_on_the_page(face: str) -> None:
    """What is torch's own, and constants, by name."""
    module = importlib.import_module(face)
    missing = []
    for name in SERVED_BY_COMPAT.get(face, module.__all__):
        value = getattr(module, name)
        there = id(value) in documented() if is_ours(value) else re.search(rf"\b{name}\b", PAGE)
        if not there and not name.startswith("_"):
            missing.append(name)
    assert not missing, f"docs/api.md lacks {missing} of {face}"


def public() -> Iterator[tuple[str, object]]:
    """Functions and classes of the page that are shardkit's, and the methods that a class defines."""
    for value in documented().values():
        if not is_ours(value):
            continue
        yield f"{value.__module__}.{value.__qualname__}", value
        if inspect.isclass(value):
            for name, method in vars(value).items():
                if inspect.isfunction(method) and not name.startswith("_"):
                    yield f"{value.__module__}.{value.__qualname__}.{name}", method


def test_everything_public_says_what_it_does() -> None:
    """An abstract method may leave it to its name and types."""
    lacking = [
        name
        for name, value in public()
        if not inspect.getdoc(value) and not getattr(value, "__isabstractmethod__", False)
    ]
    assert not lacking, lacking


def test_everything_public_says_what_it_raises() -> None:
    """Functions and methods, of shardkit's errors that they raise themselves."""
    lacking = []
    for name, value in public():
        if inspect.isfunction(value):
            text = inspect.getdoc(value) or ""
            raised = set(re.findall(r"^ +raise (\w+Error)\(", inspect.getsource(value), re.M))
            if raised and "Error" not in text:
                lacking.append((name, sorted(raised)))
    assert not lacking, lacking
