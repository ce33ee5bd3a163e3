"""docs/errors.md has every error class, and each example raises exactly that error with the message shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardkit.errors import RankFailedError, ShardkitError
from shardkit.optimizers import elementwise
from tests.pages.running import inside, show

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
SECTIONS = dict(re.findall(r"^###? (\w+Error)\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))
WITHOUT_EXAMPLE = {"ShardkitError"}


def all_errors() -> set[str]:
    """By what sources say: an import of everything takes seconds."""
    bases: dict[str, set[str]] = {}
    for folder in ("shardkit", "backends", "compat"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, listed in re.findall(r"^class (\w+)\(([^)]*)\)", path.read_text(), re.M):
                bases.setdefault(name, set()).update(re.findall(r"\w+", listed))
    found = {"ShardkitError"}
    while more := {name for name, listed in bases.items() if listed & found} - found:
        found |= more
    return found


def test_the_catalogue_is_complete() -> None:
    assert set(SECTIONS) == all_errors()
    for name, text in SECTIONS.items():
        if name not in WITHOUT_EXAMPLE:
            assert "**Cause.**" in text, name
            assert "**Remedy.**" in text, name


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - WITHOUT_EXAMPLE))
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_declared", set())  # by other tests; messages list what there is
    beginning = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    [example] = re.findall(r"^```python\n(.*?)^```$", SECTIONS[name], re.M | re.S)
    [message] = re.findall(r"^```text\n(.*?)^```$", SECTIONS[name], re.M | re.S)
    with inside(tmp_path), pytest.raises(ShardkitError) as caught:
        exec(compile(beginning + example, "train.py", "exec"), {"__name__": "__main__"})
    error = caught.value
    kind = type(error).__name__
    if isinstance(error, RankFailedError) and name != "RankFailedError":
        kind = error.remote_type
    assert kind == name, error
    found = re.sub(r"torch.accelerator knows \(\w+\)", "torch.accelerator knows (none here)", str(error))
    show(found, message, PAGE, 0)  # a build for CUDA knows it without a device
