"""TPUs through TorchTPU (the package torch_tpu): one process a chip, eager operations, process groups of torch's.

[Note: a process's chip] TorchTPU binds a process to the chip of its LOCAL_RANK when the device is first used; it can't
take another one later. Processes of one job, be it one, find each other's chips by variables that have to be the same
in all of them before they begin: ``launch`` sets them, and ``python -m torch.tpu.distributed`` prints them for
torchrun (without ``export``).
Functions of ``torch.tpu`` that torch.accelerator has too raise when others than torch call them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from shardkit.errors import BackendError, ConfigurationError

from .accelerator import AcceleratorBackend
from .c10d.group import C10dGroup
from .c10d.tpu_group import TpuGroup

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
TOPOLOGY = "TORCH_TPU_TOPOLOGY"
_SECONDS = 120.0
_TELL = "shardkit: environment "
# In a process of its own: what TorchTPU has found out once it keeps, and it reads the program's own arguments.
_ASK = f"""
import json, os, sys
import torch
before, ranks = dict(os.environ), int(sys.argv.pop())
from torch.tpu import distributed
distributed.set_tpu_launch_env(nproc_per_node=ranks)
changed = {{k: v for k, v in os.environ.items() if before.get(k) != v and k.startswith(("TORCH_TPU_", "TPU_"))}}
print({_TELL!r} + json.dumps(changed))
"""


class TpuBackend(AcceleratorBackend):
    """TPU tensors, one process a rank; see [Note: a process's chip]."""

    name = "tpu"
    device_type = "tpu"
    process_group_backend = "cpu:gloo,tpu:tpu"
    advice = (
        "install torch_tpu and libtpu on a machine with TPUs. Where they are installed, "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading them, and  python -c 'import torch_tpu'  says what "
        "else is missing"
    )

    def _select_device(self) -> None:
        """The process has its chip; only what it needs to find the others' is looked at."""
        unset = [name for name in (ADDRESSES, TOPOLOGY) if not os.environ.get(name)]
        if unset and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {' and '.join(unset)} is not set: TPU processes can't "
                'find each other\'s chips. Run  set -a; eval "$(python -m torch.tpu.distributed)"; set +a  before '
                "torchrun or shardkit run, or start the ranks with shardkit.launch(fn, world_size, backend='tpu')"
            )

    def settle(self, device: torch.device) -> None:
        """Nothing: the process has its chip."""

    def device_count(self) -> int:
        """A process that has taken its chip sees that one alone; a rank's machine has one for each of its ranks."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if os.environ.get(ADDRESSES) else 0
        return max(super().device_count(), ranks)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the host; pinned where the runtime has such memory."""
        host = tensor.detach().cpu()
        try:
            return host.pin_memory()
        except RuntimeError:  # XLA's runtime for another processor
            return host

    def _group_type(self, serves: str) -> type[C10dGroup]:
        return C10dGroup if serves == "gloo" else TpuGroup

    def _generator(self) -> torch.Generator:
        generators: tuple[torch.Generator, ...] = torch.get_device_module(self.device_type).default_generators
        return generators[self.device().index]

    def rng_state(self) -> torch.Tensor:
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)

    def _environment_of_ranks(self, world_size: int) -> dict[str, str]:
        """See [Note: a process's chip]."""
        told = subprocess.run(
            [sys.executable, "-c", _ASK, str(world_size)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        for line in told.stdout.splitlines():
            if line.startswith(_TELL):
                found: dict[str, str] = json.loads(line.removeprefix(_TELL))
                return found
        why = told.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BackendError(
            f"torch_tpu can't arrange {world_size} ranks on this machine's TPUs: {why[0]}. Launch as many ranks as the "
            "machine has chips, or another number that it has a topology for (often 1, 4 and 8)"
        )
