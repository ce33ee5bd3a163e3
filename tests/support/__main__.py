"""Runs a part of the tests on both versions of torch, and writes docs/SUPPORT.md: ``python -m tests.support``.

``--only NAME`` runs one environment anew (core, xla, tpu) and keeps the others' results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.support import report
from tests.support.recording import ROOT

# Environment, and what runs there.
RUNS = {
    "core": (
        ".venv",
        "backends/test_contract.py backends/test_late_device.py backends/test_late_programs.py "
        "fsdp/test_fully_shard.py fsdp/test_groups.py oss sharded_ddp/test_sharded_ddp.py "
        "whole_parameters/test_training.py compression/test_training.py test_grad_scaler.py adascale activations "
        "training_checkpoints/test_moving.py tracing/test_traces.py evaluation moe pipeline/test_pipe_ranks.py "
        "model_parallel compat/test_torch_fsdp.py compat/test_torch_fsdp_states.py integrations",
        "not xla and not oracle",
    ),
    "xla": (
        ".venv-xla",
        "backends/test_contract.py backends/test_xla_fsdp.py backends/test_xla_training.py oss test_grad_scaler.py "
        "xla/test_border.py",
        "not oracle",
    ),
    "tpu": (
        ".venv-tpu",  # of make torch-tpu
        "backends/test_contract.py backends/test_late_device.py backends/test_late_programs.py",
        "not (xla or cuda)",
    ),
}
_TPU = "torch_tpu"
WITHOUT = "compile or gloo3 or gloo4 or simulated3 or simulated4"  # of the contract


def run(name: str) -> tuple[str, dict[str, Any]]:
    """Version of torch, and counts."""
    environment, tests, marks = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [
            f"{environment}/bin/python",
            "-m",
            "pytest",
            "-q",
            "-m",
            marks,
            "-k",
            _TPU if name == "tpu" else f"not ({WITHOUT} or {_TPU})",
            "--support",
            str(path),
        ]
        subprocess.run(
            [*command, *(f"tests/{t}" for t in tests.split())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found = json.loads(path.read_text())
    return found["torch"], found["tests"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(RUNS))
    only = parser.parse_args().only
    results = report.read() if only else {}
    for name in RUNS:
        if only in (None, name):
            version, counts = run(name)
            new = {_TPU} if name == "tpu" else {*report.BACKENDS} - {_TPU}
            report.merge(results, version, counts, new)
    report.write(results)
