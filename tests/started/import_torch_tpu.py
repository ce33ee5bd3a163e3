"""Prints what a process finds that has imported torch_tpu."""

import json
from tests.torch_tpu.runtime import begin

module = begin()
import torch
import torch.distributed as dist
from tests.late_device.tpu import INTERNAL

said = {}
for name in INTERNAL:
    try:
        getattr(module, name)()
        said[name] = "nothing"
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
plugin = dist.Backend._plugins["TPU"]
print(
    "found "
    + json.dumps(
        {
            "internal": said,
            "extended": plugin.extended_api,
            "call": plugin.creator_fn.__doc__,
            "default": dist.Backend.default_device_backend_map["tpu"],
            "bad fork": module._is_in_bad_fork(),
            "kind": str(torch.accelerator.current_accelerator(check_available=True)),
            "count": torch.accelerator.device_count(),
            "initialized": module.is_initialized(),
            "bfloat16": torch.bfloat16 in module.get_amp_supported_dtype(),
        }
    )
)
