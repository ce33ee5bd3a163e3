"""Imported once by the process that ranks are forked from: importing torch takes each of them seconds otherwise."""

__all__ = ["hypothesis", "programs", "pytest", "shardkit", "torch"]

import hypothesis
import pytest
import torch._dynamo.backends.debugging  # by the first optimizer, and the first torch.compile
import torch.distributed.fsdp

import shardkit.fsdp
import shardkit.oss
from tests.faults import programs
