"""Faults of backends that are no processes over gloo: XLA replicas, simulated ranks."""

from __future__ import annotations

from tests.deliberate_faults.fault import XLA, Fault

_XLA, _MEETING = "tests/backends/test_xla.py", "tests/backends/test_xla_meeting.py"
_TRAINING, _FSDP = "tests/backends/test_xla_training.py", "tests/backends/test_xla_fsdp.py"
_BORDER = "tests/xla/test_border.py"

FAULTS = [
    Fault(
        "XLA replicas",
        "the all-reduce token is not dropped",
        "backends/xla/collectives.py",
        "    _RUNTIME._set_all_reduce_token(_RUNTIME._xla_get_default_device(), None)",
        "    pass",
        (f"{_XLA}::test_nan_does_not_spread_to_later_collectives",),
        XLA,
    ),
    Fault(
        "XLA replicas",
        "random states are not swapped",
        "backends/xla/turn_taking.py",
        "                    set_host_random_states(state)",
        "                    pass",
        (f"{_XLA}::test_host_random_state_is_each_replicas_own",),
        XLA,
    ),
    Fault(
        "XLA replicas",
        "what they bring is not compared",
        "backends/xla/meeting.py",
        "        if differs:\n",
        "        if False:\n",
        (f"{_MEETING}::test_different_calls",),
        XLA,
    ),
    Fault(
        "XLA replicas",
        "a replica that ends early is waited for",
        "backends/xla/meeting.py",
        "            elif members & self._gone.keys():",
        "            elif False:",
        (f"{_MEETING}::test_a_rank_that_left_is_missed_at_once_and_later",),
        XLA,
    ),
    Fault(
        "XLA collectives",
        "means are sums",
        "backends/xla/group.py",
        "return value / self.world_size if op is ReduceOp.AVG else value",
        "return value",
        (f"{_TRAINING}::test_steps_equal_one_process",),
        XLA,
    ),
    Fault(
        "XLA collectives",
        "parts of other sizes are cut at the same places",
        "backends/xla/group.py",
        "return torch.cat([slots.narrow(0, i * widest, size) for i, size in enumerate(sizes)])",
        "return slots.narrow(0, 0, sum(sizes))",
        (f"{_XLA}::test_sizes_and_dtypes",),
        XLA,
    ),
    Fault(
        "OSS on XLA",
        "flags of unused parameters stay those of the first step",
        "shardkit/reduction/packing.py",
        "        if self._sent is None or self._sent[0] != asked:",
        "        if self._sent is None:",
        (f"{_TRAINING}::test_changing_structure_and_unused_parameters",),
        XLA,
    ),
    Fault(
        "clipping on XLA",
        "the stand-in for a segment's gradients is plain zeros",
        "shardkit/oss/placement/segment_gradients.py",
        "    mark = torch.zeros_like(param).as_subclass(SegmentGradient)\n",
        "    return torch.zeros_like(param)\n    mark = torch.zeros_like(param).as_subclass(SegmentGradient)\n",
        (f"{_BORDER}::test_clip_grad_norm_of_torch", f"{_BORDER}::test_an_overflow_on_one_replica"),
        XLA,
    ),
    Fault(
        "FSDP on XLA",
        "gradients kept by `no_sync` are forgotten",
        "shardkit/fsdp/backward.py",
        "            for unit in self.units:\n                unit.note_local_gradients()\n            return",
        "            for unit in self.units:\n                unit.drop_local_gradients()\n            return",
        (f"{_FSDP}::test_training_equals_one_process_and_gloo[2-no_sync]",),
        XLA,
    ),
    Fault(
        "FSDP on XLA",
        "original parameters without gradients are not told apart by element",
        "shardkit/fsdp/gradients/lazy.py",
        "            protect_unused(flat)",
        "            pass",
        (f"{_FSDP}::test_training_equals_one_process_and_gloo[2-unused]",),
        XLA,
    ),
    Fault(
        "FSDP on XLA",
        "a compiler may merge what forward and backward gather",
        "shardkit/fsdp/store/lazy.py",
        "        self._backend.tie([shard, *after])\n",
        "",
        (f"{_FSDP}::test_a_compiler_finds_no_gather_that_it_can_drop_or_merge",),
        XLA,
    ),
    Fault(
        "simulated ranks",
        "what a collective overwrites keeps its values",
        "backends/simulated/collectives.py",
        "    for tensor in inputs:\n        _spoil(tensor)\n",
        "",
        ("tests/backends/test_simulated.py::test_undefined_contents_show",),
    ),
    Fault(
        "simulated ranks",
        "means are sums",
        "backends/simulated/collectives.py",
        "return result.div_(len(tensors)) if op is ReduceOp.AVG else result",
        "return result",
        (
            "tests/backends/test_simulated.py::test_training_equals_one_process",
            "tests/backends/test_contract.py::test_contract[reduce_scatter-simulated2]",
        ),
    ),
]
