"""What of fairscale's public surface shardkit lacks or has differently, from the facts in fairscale_api.json."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardkit.compat.redirected import is_redirected

FACTS = json.loads((Path(__file__).parent / "fairscale_api.json").read_text())
MODULES: dict[str, dict[str, Any]] = FACTS["modules"]
_PLAIN = re.compile(r"-?\d+|True|False|None|'[^']*'")  # constants that are compared by value


@dataclasses.dataclass(frozen=True)
class Finding:
    """One difference.

    Attributes:
        where: path below fairscale, e.g. ``"optim.oss.OSS.step"``.
        what: "module", "name", "re-export", "signature", "member", "base", "value" or "redirected".
        detail: expected and found, for people.
    """

    where: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where} [{self.what}] {self.detail}"


def ours(name: str) -> str:
    """The name under shardkit."""
    return re.sub(r"^fairscale\b", "shardkit", name)


def below(name: str) -> str:
    """The path below fairscale; its root is ""."""
    return name.removeprefix("fairscale").removeprefix(".")


@functools.cache
def load(module: str) -> Any:
    """A module, or the error of its import."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken module is a finding, not the end of the report
        return error


def signature_text(function: Any) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def findings_of(module: str) -> list[Finding]:
    """All differences of one of fairscale's modules."""
    facts = MODULES[module]
    if module.endswith("__main__"):  # it is run, not imported
        package = load(ours(module.rpartition(".")[0]))
        there = any((Path(p) / "__main__.py").exists() for p in getattr(package, "__path__", []))
        return [] if there else [Finding(below(module), "module", "there is no such module")]
    found = load(ours(module))
    if isinstance(found, Exception):
        return [Finding(below(module), "module", f"{type(found).__name__}: {found}")]
    return list(_in_module(module, facts, found))


def _in_module(name: str, facts: dict[str, Any], module: Any) -> Iterator[Finding]:
    prefix = f"{below(name)}.".lstrip(".")
    for kind in ("classes", "functions", "constants"):
        for short, expected in facts.get(kind, {}).items():
            if short.startswith("_"):
                continue
            where = prefix + short
            thing = getattr(module, short, Finding)  # Finding: nothing of shardkit's
            if thing is Finding:
                yield Finding(where, "name", f"one of its {kind} is missing")
            elif is_redirected(thing):
                yield Finding(where, "redirected", thing.__doc__ or "")
            elif kind == "classes":
                yield from _in_class(where, expected, thing)
            elif kind == "functions":
                yield from _signature(where, expected, thing)
            elif _PLAIN.fullmatch(expected) and repr(thing) != expected:
                yield Finding(where, "value", f"is {thing!r}, expected {expected}")
    for short, home in facts.get("reexports", {}).items():
        yield from _reexport(prefix + short, home, module, short)


def _reexport(where: str, home: str, module: Any, short: str) -> Iterator[Finding]:
    if not hasattr(module, short):
        yield Finding(where, "re-export", f"of {home} is missing")
        return
    if home.startswith("."):  # relative to the package, as read from the source
        home = module.__name__.rpartition(".")[0] + home
    if home.startswith("module "):
        there = load(ours(home.removeprefix("module ")))
    else:
        path, _, name = home.rpartition(".")
        there = getattr(load(ours(path)), name, None)
    if there is not None and not isinstance(there, Exception) and getattr(module, short) is not there:
        yield Finding(where, "re-export", f"is not {home}")


def _signature(where: str, expected: str, function: Any) -> Iterator[Finding]:
    expected = expected.replace(f"'{FACTS['torch']}'", repr(torch.__version__)).replace(
        "fairscale.", "shardkit."
    )
    try:
        found = signature_text(function)
    except (TypeError, ValueError) as error:
        found = f"none: {error}"
    if found != expected:
        yield Finding(where, "signature", f"is {found}, expected {expected}")


def _in_class(where: str, facts: dict[str, Any], cls: Any) -> Iterator[Finding]:
    if not isinstance(cls, type):
        yield Finding(where, "name", "is no class")
        return
    for base in [*facts.get("mro", [])[1:], *facts.get("bases", [])]:
        path, _, name = ours(base).rpartition(".")
        there = getattr(load(path), name, None) if path else None
        if isinstance(there, type) and not is_redirected(there) and not issubclass(cls, there):
            yield Finding(where, "base", f"is no subclass of {ours(base)}")
    if "init" in facts:
        yield from _signature(f"{where}.__init__", facts["init"], cls.__init__)
    yield from _methods(where, facts, cls)
    yield from _values(where, facts, cls)


def _methods(where: str, facts: dict[str, Any], cls: type) -> Iterator[Finding]:
    for kind in ("methods", "staticmethods", "classmethods"):
        for name, expected in facts.get(kind, {}).items():
            if not hasattr(cls, name):
                yield Finding(f"{where}.{name}", "member", f"is missing ({kind})")
                continue
            if kind == "classmethods":  # looked up on the class, it has no first argument any more
                expected = re.sub(r"^\(\w+(, )?", "(", expected)
            yield from _signature(f"{where}.{name}", expected, getattr(cls, name))


def _values(where: str, facts: dict[str, Any], cls: type) -> Iterator[Finding]:
    for name, settable in facts.get("properties", {}).items():
        there = inspect.getattr_static(cls, name, None)
        if there is None:
            yield Finding(f"{where}.{name}", "member", "is missing (property)")
        elif settable and isinstance(there, property) and there.fset is None:
            yield Finding(f"{where}.{name}", "member", "can't be set")
    for kind in ("class_attributes", "members"):
        for name, expected in facts.get(kind, {}).items():
            value = getattr(cls, name, Finding)
            value = value.value if isinstance(value, enum.Enum) and isinstance(value, cls) else value
            if value is Finding:
                yield Finding(f"{where}.{name}", "member", f"is missing ({kind})")
            elif _PLAIN.fullmatch(expected) and repr(value) != expected:
                yield Finding(f"{where}.{name}", "value", f"is {value!r}, expected {expected}")
