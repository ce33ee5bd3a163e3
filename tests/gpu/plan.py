"""What is run, in which order and for how long at most."""

from __future__ import annotations

from dataclasses import dataclass, field

ROW = "ROW "  # a line of a phase's output that is data


@dataclass(frozen=True)
class Phase:
    """A process of its own.

    Attributes:
        kind: a function of tests.gpu.phase.
        limit: seconds; then it is ended, and what it has found so far counts.
        arguments: of the function.
    """

    name: str
    kind: str
    limit: float
    arguments: dict[str, str] = field(default_factory=dict)


_CONTRACT = "tests/backends/test_contract.py"
_ONE_DEVICE = "tests/backends/test_cuda_one_device.py"
_IN_CONTRACT = "test_contract or test_groups_in_groups"
_CUDA_TESTS = (  # where tests are marked
    "tests/backends tests/activations tests/extra/test_streams.py tests/pipeline/test_pipe.py tests/wrapping "
    "tests/sharded_ddp/test_buffers.py"
)
# On two to four ranks that share the first device; without what needs numpy.
_SHARED_TESTS = (
    "--device cuda tests/fsdp/test_fsdp.py tests/fsdp/test_fully_shard.py tests/border/test_kept_views.py "
    "tests/border/test_inside.py tests/border/test_optimizers.py tests/border/test_copies.py"
)
_OF_THE_HOST = "numpy or simulated"
# (size, variant, seconds), the most telling first: time may run out
_BENCHMARKS = (
    ("1.3B", "plain", 110), ("124M", "plain", 70), ("7B", "checkpointed", 130), ("4B", "offload", 200),
    ("1.3B", "mixed", 90), ("124M", "compiled", 110), ("1.3B", "compiled", 150), ("124M", "checkpointed", 60),
    ("1.3B", "checkpointed", 100), ("1.3B", "both", 150), ("7B", "plain", 130), ("124M", "mixed", 60),
    ("7B", "mixed", 130), ("124M", "both", 110),
)  # fmt: skip


def plan(device: str, devices: int) -> tuple[list[Phase], list[str]]:
    """The phases, and a line for each thing that needs more devices than there are."""
    if device == "cpu":
        return _trial(), []
    phases = [
        Phase("environment", "environment", 60),
        Phase(
            "contract",
            "tests",
            240,
            {"paths": f"{_CONTRACT} {_ONE_DEVICE}", "select": "cuda", "words": _IN_CONTRACT},
        ),
        Phase("alignment", "alignment", 60),
        Phase("channels", "channels", 90),
        *(Phase(f"bench {s} {v}", "bench", t, {"size": s, "variant": v}) for s, v, t in _BENCHMARKS[:5]),
        Phase(
            "tests", "tests", 300, {"paths": _CUDA_TESTS, "select": "cuda", "words": f"not ({_IN_CONTRACT})"}
        ),
        *(Phase(f"bench {s} {v}", "bench", t, {"size": s, "variant": v}) for s, v, t in _BENCHMARKS[5:]),
        Phase(
            "tests of ranks that share a device",
            "tests",
            600,
            {"paths": _SHARED_TESTS, "select": "not cuda and not xla", "words": f"not ({_OF_THE_HOST})"},
        ),
    ]
    skipped = []
    for needed, what in (
        (2, "NCCL between devices, exposed communication, uneven parts, late ranks (1 device: world size 1, and two "
            "ranks on one device, over gloo and over NCCL's sockets)"),
        (4, "the contract on 4 ranks, groups in groups"),
    ):  # fmt: skip
        if devices < needed:
            skipped.append(f"needs {needed} devices: {what}")
    return phases, skipped


def _trial() -> list[Phase]:
    """The same program at the smallest size, over gloo: it shows that all of it runs, and no times."""
    return [
        Phase("environment", "environment", 60),
        Phase("contract", "tests", 120, {"paths": _CONTRACT, "words": "simulated2 and test_contract"}),
        Phase("alignment", "alignment", 60),
        Phase("channels", "channels", 60),
        *(
            Phase(f"bench tiny {v}", "bench", 60, {"size": "tiny", "variant": v})
            for v in ("plain", "both", "mixed", "offload")
        ),
    ]
