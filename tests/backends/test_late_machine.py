"""Programs as they are on a machine whose accelerator torch finds when it is imported: nobody names a backend."""

from __future__ import annotations

import os

import pytest

from tests.late_device.build import library, missing
from tests.started import ROOT, output_of, program

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"the device can't be compiled: {missing()}"),
]


def test_launch_takes_the_accelerator() -> None:
    library()
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests/late_device/machine'}"
    printed = output_of(
        program("train_on_the_accelerator"), PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="1"
    )
    assert {"late:0", "late:1", "the CPU's numbers"} <= set(printed.split("\n"))
