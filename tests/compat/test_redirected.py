"""Names without a purpose today: importing, subclassing and isinstance work, any use says what to take instead."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.compat.redirected import is_redirected, redirected, redirected_function, redirected_names
from shardkit.compat.redirections import REDIRECTED, REDIRECTED_MODULES, Redirection
from shardkit.compat.reexports import REEXPORTED, origins
from shardkit.errors import RedirectedError

Old = redirected("nn.attic.Old", "torch.nn.New", why="torch has it")
old_function = redirected_function("nn.attic.old_function", "torch.new_function", why="torch has it")


class Child(Old):  # type: ignore[misc, valid-type]
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda: Old(), ["fairscale.nn.attic.Old", "torch.nn.New", "torch has it"]),
        (lambda: Old(1, size=2), ["torch.nn.New"]),
        (lambda: Child(3), ["torch.nn.New"]),
        (lambda: Old.from_config, ["torch.nn.New", "from_config"]),
        (lambda: Child.from_config(), ["torch.nn.New", "from_config"]),
        (lambda: old_function(1, key=2), ["fairscale.nn.attic.old_function", "torch.new_function"]),
    ],
)
def test_use_says_what_to_take(use: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(RedirectedError) as caught:
        use()
    for name in names:
        assert name in str(caught.value)


def test_what_does_not_use_it_works() -> None:
    assert not isinstance(1, Old)
    assert issubclass(Child, Old)
    assert (Old.__module__, Old.__qualname__) == ("shardkit.nn.attic", "Old")
    assert old_function.__module__ == "shardkit.nn.attic"
    assert not hasattr(Old, "__wrapped__")
    assert "torch.nn.New" in str(inspect.getdoc(Old))


def test_names_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Redirection("nn.attic: LIMIT", "torch.nn.New", "torch has it")
    monkeypatch.setattr("shardkit.compat.redirected.REDIRECTED", [entry])
    get = redirected_names("shardkit.nn.attic")
    assert is_redirected(get("LIMIT"))
    assert get("LIMIT") is get("LIMIT")
    with pytest.raises(RedirectedError, match=r"fairscale\.nn\.attic\.LIMIT is not carried over"):
        get("LIMIT")()
    with pytest.raises(AttributeError, match="no attribute 'LIMITS'"):
        get("LIMITS")


def test_only_the_name_itself_is_marked() -> None:
    assert is_redirected(Old)
    assert is_redirected(old_function)
    assert not is_redirected(Child)
    assert not is_redirected(int)
    assert not is_redirected(3)


@pytest.mark.parametrize("path", sorted({*REDIRECTED_MODULES, *REEXPORTED}))
def test_the_table_is_served(path: str) -> None:
    """Every entry, at its module: made of the table alone, or of a file in ``compat/`` that takes its entries."""
    module = importlib.import_module(f"shardkit.{path}")
    names = [n.removesuffix("()") for entry in REDIRECTED for n in entry.of(path)]
    for name in names:
        thing = getattr(module, name)
        assert is_redirected(thing), name
        assert thing is getattr(module, name)
        assert pickle.loads(pickle.dumps(thing)) is thing
    for here, (home, there) in origins(path).items():
        assert getattr(module, here) is getattr(importlib.import_module(f"shardkit.{home}"), there)
    exported: dict[str, object] = {}
    exec(f"from shardkit.{path} import *", exported)
    assert {n for n in names if n in getattr(module, "__all__", ())} <= exported.keys()
    with pytest.raises(ImportError):
        exec(f"from shardkit.{path} import no_such_name")


def test_a_folder_that_only_holds_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = importlib.import_module("shardkit.experimental.nn")
    (tmp_path / "ampnet_pipe" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(parent, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "shardkit.experimental.nn.ampnet_pipe", raising=False)
    found = importlib.util.find_spec("shardkit.experimental.nn.ampnet_pipe")
    assert found is not None
    assert found.origin == "the table of shardkit.compat.redirections"


def test_modules_without_a_file() -> None:
    spec = importlib.util.find_spec("shardkit.nn.pipe.skip.portal")
    assert spec is not None
    assert spec.submodule_search_locations is None
    package = importlib.util.find_spec("shardkit.experimental.nn.distributed_pipeline")
    assert package is not None
    assert package.submodule_search_locations == []
    assert importlib.util.find_spec("shardkit.nn.pipe.no_such_module") is None
    assert "PortalBlue" in dir(importlib.import_module("shardkit.nn.pipe.skip.portal"))
