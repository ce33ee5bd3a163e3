"""Names of phases in profiler traces."""

from __future__ import annotations

import torch

# Written in C++: it costs no Python call and records nothing unless a profiler runs. (torch.profiler.record_function
# makes some fifteen Python calls each time, profiler or not.)
Phase = torch._C._profiler._RecordFunctionFast
