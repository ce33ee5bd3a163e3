"""Under ``make fuzz``, what a drawn example finds becomes a test of its own in ``tests/differential/found/``."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import torch

FOUND = Path(__file__).with_name("found")
_KEEPING = int(os.environ.get("SHARDKIT_FUZZ", "1")) > 1
_COUNTS = os.environ.get("SHARDKIT_FUZZ_COUNTS")  # a file: how many examples each check has seen
_counts: Counter[str] = Counter()


def kept(check: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function of plain data that raises where implementations part.

    Shrinking fails again and again with smaller arguments; the last ones, the smallest, are what stays.
    """

    @functools.wraps(check)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if not (_KEEPING and hypothesis.currently_in_test_context()):
            return check(*args, **kwargs)
        _count(check.__name__)
        try:
            check(*args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise  # an example that was given up, not a failure
        except Exception as error:
            keep(check, args, kwargs, error)
            raise

    return wrapped


def keep(
    check: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: BaseException
) -> Path:
    """Writes the test that calls ``check`` with these arguments; returns its file."""
    slug = re.sub(r"\W+", "_", os.environ.get("PYTEST_CURRENT_TEST", check.__name__).split(" ")[0])
    path = FOUND / f"test_{slug.strip('_')[-120:]}.py"
    given = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
    imports = {f"from {check.__module__} import {check.__name__}"}
    imports |= {f"from {t.__module__} import {t.__qualname__}" for t in _types((args, kwargs))}
    first = (str(error).splitlines() or [type(error).__name__])[0].replace("\\", "/").replace('"', "'")
    arguments = "".join(f"\n        {text}," for text in given)
    FOUND.mkdir(exist_ok=True)
    path.write_text(
        f'"""Found by drawing: {first[:300]}"""\n\n# ruff: noqa: E501, F401, I001\n'
        "from math import inf, nan\n\nimport torch\n\n" + "\n".join(sorted(imports)) + "\n\n\n"
        f"def test_found() -> None:\n    {check.__name__}({arguments}\n    )\n"
    )
    return path


def _types(value: Any) -> Iterator[type]:
    """The dataclasses whose names stand in a value's text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for f in dataclasses.fields(value):
            yield from _types(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _types(pair)
    elif isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
        for item in value:
            yield from _types(item)


def _count(name: str) -> None:
    _counts[name] += 1
    if _COUNTS is not None:
        Path(_COUNTS).write_text("\n".join(f"{k} {n}" for k, n in _counts.items()))
