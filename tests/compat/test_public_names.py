"""What 0.2.0 let one import can be imported: names of ``shardkit``, of pages, and of the modules of compat/.

``public_names_0_2.txt`` has a module a line, with its names; some are modules themselves. It is as 0.2.0 printed it.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardkit.compat.reexports import MOVED

LINES = (Path(__file__).parent / "public_names_0_2.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(":")[0])
def test_names_of_the_last_release(line: str) -> None:
    path, _, names = line.partition(":")
    module = importlib.import_module(path)
    for name in names.split():
        if not hasattr(module, name) and (
            f"{path}.{name}" != "shardkit.xla.xla_backend" or find_spec("torch_xla")
        ):
            importlib.import_module(f"{path}.{name}")


@pytest.mark.parametrize("old", MOVED)
def test_moved_modules_are_the_same_objects(old: str) -> None:
    before, now = (importlib.import_module(f"shardkit.{path}") for path in (old, MOVED[old]))
    assert before is now


def test_what_is_below_a_moved_package_moves_along() -> None:
    from shardkit.estimate.devices import Device
    from shardkit.tools.estimate import devices

    assert Device is devices.Device
