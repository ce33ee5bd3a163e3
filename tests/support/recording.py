"""Counts tests by feature, backend and number of ranks, while they run: ``pytest --support FILE``.

The feature is known by the test's file, backend and number of ranks by the pools that the test asks for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.pools import USED

ROOT = Path(__file__).resolve().parents[2]
# feature -> {backend: {ranks: [passed, failed]}}
Counts: TypeAlias = dict[str, dict[str, dict[str, list[int]]]]

# In the order of the table. Files or folders below tests/; the first that fits has a test.
FEATURES = {
    "collectives and groups": "backends/test_contract.py backends/test_xla.py",
    "`fully_shard`": "fsdp/test_fully_shard.py fsdp/test_dtensors.py",
    "`FSDP`": "fsdp backends/test_xla_fsdp.py",
    "`OSS`": "oss",
    "`ShardedDDP`": "sharded_ddp backends/test_xla_training.py",
    "`WholeParameters` (Muon, Shampoo, ...)": "whole_parameters",
    "`Compression` (int8, float8)": "compression",
    "users' programs on accelerators": "backends/test_late_device.py backends/test_late_programs.py",
    "gradient scaling": "test_grad_scaler.py",
    "`AdaScale`": "adascale backends/test_xla_adascale_moe.py",
    "activation checkpoints": "activations",
    "checkpoints (`save`, `restore`)": "training_checkpoints",
    "`EvaluationSampler`, `gather`": "evaluation",
    "traces and metrics": "tracing",
    "mixture of experts": "moe",
    "pipelines": "pipeline",
    "model parallelism": "model_parallel",
    "torch's FSDP1 interface": "compat/test_torch_fsdp.py compat/test_torch_fsdp_states.py",
    "torch_xla's interfaces": "xla",
    "transformers, accelerate, peft": "integrations/test_huggingface.py",
    "Lightning, Fabric": "integrations/test_lightning.py",
}


def feature_of(path: Path) -> str | None:
    """Of a test's file."""
    name = path.relative_to(ROOT / "tests").as_posix()
    for feature, places in FEATURES.items():
        if any(name == place or name.startswith(place + "/") for place in places.split()):
            return feature
    return None


class Recorder:
    """A plugin of pytest.

    Args:
        path: of the file that is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counts = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: [0, 0])))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        USED.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> object:
        report = yield
        feature = feature_of(item.path)
        if feature is not None and report.when == "call" and not report.skipped:
            for ranks, backend in USED:
                self._counts[feature][backend][str(ranks)][report.failed] += 1
        return report

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"torch": torch.__version__.split("+")[0], "tests": self._counts}))
