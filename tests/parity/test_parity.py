"""Every public path, name and signature of fairscale 0.4.13 is shardkit's, or listed with its reason."""

from __future__ import annotations

import pytest

from tests.parity import surface
from tests.parity.differences import DIFFERENCES
from tests.parity.report import REPORT, entry_of, report
from tests.parity.surface import MODULES, Finding, below, findings_of


@pytest.mark.parametrize("module", MODULES)
def test_module(module: str) -> None:
    unlisted = [str(f) for f in findings_of(module) if entry_of(f) is None]
    assert not unlisted, "\n".join(["not in tests/parity/differences.py:", *unlisted])


def test_no_entry_is_stale() -> None:
    findings = [f for module in MODULES for f in findings_of(module)]
    needed = {entry_of(f) for f in findings}
    stale = [d for d in DIFFERENCES if d.kind != "behaviour" and d not in needed]
    assert not stale, f"nothing needs them any more: {stale}"


def test_behaviour_is_of_something_that_fairscale_has() -> None:
    known = set()
    for module, facts in MODULES.items():
        known.add(below(module))
        known |= {f"{below(module)}.{n}" for n in facts.get("functions", {})}
        for name, cls in facts.get("classes", {}).items():
            known |= {
                f"{below(module)}.{name}",
                *(f"{below(module)}.{name}.{m}" for m in cls.get("methods", {})),
            }
    assert {d.where for d in DIFFERENCES if d.kind == "behaviour"} <= known


def test_the_page_is_up_to_date() -> None:
    assert REPORT.read_text() == report(), "run python -m tests.parity.report"


FACTS = {
    "classes": {
        "C": {
            "bases": ["torch.nn.modules.module.Module"],
            "init": "(self, a, b=1)",
            "methods": {"m": "(self, x)"},
            "properties": {"p": True},
            "members": {},
            "class_attributes": {"k": "3"},
        }
    },
    "functions": {"f": "(a, /, b, *, c=None)"},
    "constants": {"K": "7"},
    "reexports": {"nn": "module fairscale.nn", "OSS": "fairscale.optim.oss.OSS"},
}
GOOD = """
import shardkit.nn as nn, torch
from shardkit.optim.oss import OSS
K = 7
def f(a, /, b, *, c=None): pass
class C(torch.nn.Module):
    k = 3
    def __init__(self, a, b=1): pass
    def m(self, x): pass
    p = property(m, m)
"""
FAULTS = [
    ("def f(a, /, b, *, c=None)", "def f(a, b, *, c=None)", "f [signature]"),
    ("def f(a, /, b, *, c=None)", "def f(a, /, b, c=None)", "f [signature]"),
    ("def f(a, /, b, *, c=None)", "def f(a, /, c, *, b=None)", "f [signature]"),
    ("def f(a, /, b, *, c=None)", "def f(a, /, b, *, c=0)", "f [signature]"),
    ("def f(", "def g(", "f [name]"),
    ("b=1", "b=2", "C.__init__ [signature]"),
    ("def m(self, x)", "def m(self, y)", "C.m [signature]"),
    ("property(m, m)", "property(m)", "C.p [member]"),
    ("p = property(m, m)", "pass", "C.p [member]"),
    ("class C(torch.nn.Module)", "class C", "C [base]"),
    ("k = 3", "k = 4", "C.k [value]"),
    ("K = 7", "K = 8", "K [value]"),
    ("import OSS", "import OSS as SSO", "OSS [re-export]"),
    ("shardkit.optim.oss import", "shardkit.oss import", "OSS [re-export]"),
    ("shardkit.nn as nn", "shardkit.optim as nn", "nn [re-export]"),
]


def _findings(source: str, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    import types

    module = types.ModuleType("shardkit.made_up")
    exec(source, module.__dict__)
    monkeypatch.setitem(MODULES, "fairscale.made_up", FACTS)
    monkeypatch.setattr(surface, "load", lambda name: module if name.endswith("made_up") else _load(name))
    return findings_of("fairscale.made_up")


_load = surface.load


def test_a_faithful_module_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _findings(GOOD, monkeypatch) == []


@pytest.mark.parametrize(("old", "new", "expected"), FAULTS)
def test_a_fault_is_found(old: str, new: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert old in GOOD
    (finding,) = _findings(GOOD.replace(old, new), monkeypatch)
    assert str(finding).startswith(f"made_up.{expected}")
