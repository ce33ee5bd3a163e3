"""What the backend "tpu" and the device of tests/late_device rely on, held to torch_tpu.

Its sources are read from a wheel (TORCH_TPU_WHEEL) or from the installed package. Where it is installed it is imported
too, as far as that goes without a TPU. ``make torch-tpu`` does both, and runs the contract suite on it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.backends import tpu
from tests.late_device.tpu import INTERNAL
from tests.started import program, ran
from tests.torch_tpu import runtime, wheel

if sys.version_info >= (3, 11):
    import tomllib

pytestmark = [
    pytest.mark.skipif(bool(wheel.missing()), reason=wheel.missing()),
]
_DISTRIBUTED = "_internal/distributed/distributed.py"
_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_extra_is_what_the_wheel_asks_for() -> None:
    metadata = wheel.text("METADATA")
    version = next(line.split()[1] for line in metadata.splitlines() if line.startswith("Version:"))
    torch, torch_tpu = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["tpu"]
    assert torch_tpu.startswith(f"torch_tpu=={version};")
    low, high = torch.removeprefix("torch>=").split(",<=")
    assert f"Requires-Dist: torch>={low}.0,<={high}" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "Requires-Dist: libtpu" in metadata


def test_importing_torch_loads_it() -> None:
    assert "torch_tpu = torch_tpu._loader:load" in wheel.text("entry_points.txt")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in wheel.text("_loader.py")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in tpu.TpuBackend.advice


def test_names_of_its_process_groups() -> None:
    """torch takes the first as the device's default; the second one is what users write."""
    found = wheel.calls("_loader.py", "Backend.register_backend")
    assert [ast.literal_eval(call.args[0]) for call in found] == ["tpu_dist", "tpu"]
    for call in found:
        assert ast.unparse(call.args[1]) == "tpu_distributed.create_process_group"
        assert {k.arg: ast.literal_eval(k.value) for k in call.keywords} == {"devices": ["tpu"]}  # no options


def test_what_torch_alone_may_call() -> None:
    found = wheel.torch_alone_may_call()
    assert set(INTERNAL) <= found
    # these, nobody here asks for; "_DeviceContext" is torch.tpu.device
    assert found - set(INTERNAL) == {"initial_seed", "_DeviceContext"}
    message = " ".join(wheel.text("_internal/utils/annotations.py").split())
    assert "is internal to TorchTPU and can only be called by the" in message
    assert "internal_when=get_torch_version() >= (2, 11)" in wheel.text(wheel.DEVICE_MODULE)


def test_what_is_used_of_its_module() -> None:
    exported = wheel.text("_internal/public_api.py")
    for name in (*INTERNAL, "default_generators", "is_initialized", "set_rng_state", "manual_seed", "manual_seed_all",
                 "get_amp_supported_dtype"):  # fmt: skip
        assert f'"{name}": _tpu_attr("{name}")' in exported, name
    assert "private_fallback=_TPU_DEVICE_CLASS" in exported  # for torch: _is_in_bad_fork and the like
    assert wheel.function(wheel.DEVICE_MODULE, "_is_in_bad_fork")
    assert "exactly `owner.device_count()` elements, ordered by device ordinal" in " ".join(
        wheel.text(wheel.DEVICE_MODULE).split()
    )


def test_a_process_has_one_chip() -> None:
    code = ast.unparse(wheel.function(wheel.DEVICE_MODULE, "set_device"))
    assert "current process is bound to device index" in code
    assert b"LOCAL_RANK" in wheel.native()


def test_one_stream() -> None:
    said = " ".join(wheel.text("_internal/stream/streams.py").split())
    assert "torch_tpu has a single implicit stream per device" in said
    assert "Both events must be created with ``enable_timing=True``" in said


def test_how_processes_find_each_other() -> None:
    asked = wheel.function(_DISTRIBUTED, "set_tpu_launch_env").args
    assert [a.arg for a in asked.kwonlyargs] == ["nnodes", "nproc_per_node"]
    assert not asked.args
    assert "distributed.set_tpu_launch_env(nproc_per_node=ranks)" in tpu._ASK
    assert '"set_tpu_launch_env": (' in wheel.text("_internal/public_api.py")
    for name in (tpu.ADDRESSES, tpu.TOPOLOGY):
        assert f'"{name}"' in wheel.text(_DISTRIBUTED)
        assert name.encode() in wheel.native()
    assert b"missing required environment variables for distributed training" in wheel.native()
    # python -m torch.tpu.distributed: not exported, so "set -a" is needed
    printed = ast.unparse(wheel.function(_DISTRIBUTED, "_print_launch_env"))
    assert f"print(f'{tpu.TOPOLOGY}=" in printed.replace('"', "'")
    assert "export" not in printed
    assert 'main="torch_tpu._internal.distributed.distributed"' in wheel.text("_internal/public_api.py")


def test_topologies() -> None:
    """The numbers of ranks that the error of ``launch`` names."""
    hardware = wheel.text("_internal/utils/hardware.py")
    assert "No TPU topology found for count" in hardware
    for ranks, shape in {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}.items():
        assert f'{ranks}: "{shape}"' in hardware


@pytest.mark.parametrize(
    "message",
    [
        "the first initialized ProcessGroupTpu must be of size WORLD_SIZE",
        "Incomplete or overlapping subgroups are not supported in SPMD.",
        "_torchtpu_internal_gather_all_subgroups",
        "asymmetric input buffer sizes across ranks are not supported on TPU",
        "asymmetric output buffer sizes across ranks are not supported on TPU",
    ],
)
def test_rules_of_its_process_groups(message: str) -> None:
    assert message.encode() in wheel.native()
    assert tpu.__doc__ is not None


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process sees that has imported it; no TPU is asked for."""
    pytest.importorskip(
        "torch_tpu", reason="torch_tpu is not installed (make torch-tpu)", exc_type=ImportError
    )
    run = ran(program("import_torch_tpu"), TPU_SKIP_MDS_QUERY="1", XLA_FLAGS="")
    told = [line for line in run.stdout.splitlines() if line.startswith("found ")]
    assert told, run.stderr[-3000:]
    result: dict[str, Any] = json.loads(told[0].removeprefix("found "))
    return result


def test_imported(found: dict[str, Any]) -> None:
    assert found["kind"] == "tpu"
    assert found["count"] == runtime.DEVICES
    assert not found["initialized"]  # asking takes no chip
    assert found["bfloat16"]
    assert not found["bad fork"]


def test_imported_calls(found: dict[str, Any]) -> None:
    for name, said in found["internal"].items():
        assert "is internal to TorchTPU and can only be called by the PyTorch framework" in said, name
        assert said.startswith("RuntimeError: "), name


def test_imported_process_groups(found: dict[str, Any]) -> None:
    assert found["default"] == "tpu_dist"
    assert found["extended"] is False
    assert "timedelta) -> torch._C._distributed_c10d.Backend" in found["call"]
    assert found["call"].count("arg") == 4  # store, rank, size, timeout
