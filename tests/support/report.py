"""docs/SUPPORT.md of docs/support.json, the results of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.recording import FEATURES, ROOT

RESULTS, PAGE = ROOT / "docs" / "support.json", ROOT / "docs" / "SUPPORT.md"
BACKENDS = {
    "gloo": "gloo",
    "simulated": "simulated",
    "streams": "streams",
    "late": "late device",
    "tpu": "late device as TorchTPU",
    "torch_tpu": "torch_tpu on a CPU",
    "cuda": "CUDA",
    "xla": "XLA replicas",
}

_HEAD = """# Support

What was tested on which backend, with how many ranks. The table is made of the results of tests:
`python -m tests.support` runs a part of them, {count} here, and writes `docs/support.json` and this page. A cell has
the numbers of ranks, and how many tests went well with them.

- A dash: no test of this run. Either the backend takes no part in it (transformers on XLA), or the run left it out.
- Tests that failed are in bold.
- `simulated` ranks are threads of one process, for tests and for trying out.
- The late device stands for an accelerator that shardkit has no class for, then for a TPU under TorchTPU's rules;
  the column after it is `torch_tpu` itself, compiled for the CPU ([TPUs](TPU.md)). No TPU was used.
{cuda}
"""
_NO_CUDA = """- CUDA has no column: what ran on a GPU is in [GPUs](GPU.md). [Testing](TESTING.md) has what else was
  checked, and what not; `make gpu` runs the tests on a machine that has one.
"""


def cell(counts: dict[str, list[int]] | None) -> str:
    if not counts:
        return "-"
    passed, failed = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    ranks = ", ".join(sorted(counts, key=int))
    return f"{ranks} ranks: {passed}" + (f", **{failed} failed**" if failed else "")


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    columns = [
        (version, backend)
        for version in sorted(results, key=lambda v: [*map(int, v.split("."))], reverse=True)
        for backend in BACKENDS
        if any(backend in found for found in results[version].values())
    ]
    head = ["feature", *(f"{BACKENDS[backend]}, torch {version}" for version, backend in columns)]
    rows = [
        [feature, *(cell(results[version].get(feature, {}).get(backend)) for version, backend in columns)]
        for feature in FEATURES
        if any(feature in found for found in results.values())
    ]
    count = sum(
        sum(pair)
        for found in results.values()
        for backends in found.values()
        for ranks in backends.values()
        for pair in ranks.values()
    )
    has_cuda = any(backend == "cuda" for _, backend in columns)
    table = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return _HEAD.format(count=f"{count:,}", cuda="" if has_cuda else _NO_CUDA) + "\n".join(table) + "\n"


def read() -> dict[str, Any]:
    """By version of torch."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def merge(results: dict[str, Any], version: str, counts: dict[str, Any], backends: set[str]) -> None:
    """Puts a run's counts in the place of what was there of these backends."""
    of_version = results.setdefault(version, {})
    for feature in [*of_version, *counts]:
        found = of_version.setdefault(feature, {})
        for backend in backends:
            found.pop(backend, None)
        found.update(counts.get(feature, {}))


def write(results: dict[str, Any]) -> None:
    """Both files."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    Path(PAGE).write_text(page(results))
