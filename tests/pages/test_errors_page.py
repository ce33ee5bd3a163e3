"""docs/errors.md has every error class, and each example raises exactly that error with the message shown."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import RankFailedError, ShardkitError
from tests.pages.running import inside, show

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
SECTIONS = dict(re.findall(r"^###? (\w+Error)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))
WITHOUT_EXAMPLE = {"ShardkitError"}


def classes_below(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from classes_below(sub)


@lru_cache(maxsize=1)
def all_errors() -> frozenset[str]:
    """Of every module that can be imported here."""
    for found in pkgutil.walk_packages(shardkit.__path__, "shardkit.", onerror=lambda name: None):
        if not re.search(r"\.(xla|examples|__main__|experimental|fair_dev)\b", found.name):
            importlib.import_module(found.name)
    ours = {k for k in classes_below(ShardkitError) if k.__module__.startswith("shardkit.")}
    return frozenset({"ShardkitError", *(k.__name__ for k in ours)})


def test_the_catalogue_is_complete() -> None:
    assert set(SECTIONS) == all_errors()
    for name, text in SECTIONS.items():
        if name not in WITHOUT_EXAMPLE:
            assert "**Cause.**" in text, name
            assert "**Remedy.**" in text, name


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - WITHOUT_EXAMPLE))
def test_example(name: str, tmp_path: Path) -> None:
    beginning = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    [example] = re.findall(r"^```python\n(.*?)^```$", SECTIONS[name], re.M | re.S)
    [message] = re.findall(r"^```text\n(.*?)^```$", SECTIONS[name], re.M | re.S)
    with inside(tmp_path), pytest.raises(ShardkitError) as caught:
        exec(compile(beginning + example, f"{PAGE.name}, {name}", "exec"), {"__name__": "__main__"})
    error = caught.value
    kind = type(error).__name__
    if isinstance(error, RankFailedError) and name != "RankFailedError":
        kind = error.remote_type
    assert kind == name, error
    show(str(error), message, PAGE, 0)
