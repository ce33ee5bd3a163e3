"""Imported once by the process that ranks are forked from: importing torch takes each of them seconds otherwise."""

__all__ = ["programs", "torch"]

import torch._dynamo  # by the first optimizer
import torch.distributed
import torch.distributed.fsdp

from tests.faults import programs
