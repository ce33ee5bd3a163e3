"""What is used of torch's bindings for CUDA and NCCL, held to a build that has them; no driver and no device is needed.

The uses are read from the source, so that none is left out.
"""

from __future__ import annotations

import ast
import datetime
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardkit.backends.accelerator as streams

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_nccl_available(), reason="this torch was built without NCCL"
)

MODULES = ("cuda", "accelerator", "c10d.group")
PROCESS_GROUP = "torch.distributed.ProcessGroup"
NCCL = "torch.distributed.ProcessGroupNCCL"
# What the names of our own variables and attributes stand for.
STANDS_FOR: dict[tuple[str, str], tuple[str, ...]] = {
    ("cuda", "options"): (f"{NCCL}.Options",),
    ("cuda", "nccl"): (NCCL,),
    ("cuda", "pg"): (PROCESS_GROUP,),
    ("cuda", "process_group"): (PROCESS_GROUP,),
    ("accelerator", "process_group"): (PROCESS_GROUP,),
    ("cuda", "self.process_group"): (PROCESS_GROUP,),
    ("accelerator", "self.process_group"): (PROCESS_GROUP,),
    ("accelerator", "work"): ("torch.distributed.Work",),
}
OPTION_CLASSES = {
    "reduceOp": ("AllreduceOptions", "ReduceOptions", "ReduceScatterOptions"),
    "rootRank": ("ReduceOptions",),
    "_timeout": ("Backend.Options",),
    **dict.fromkeys(
        ("store", "group_rank", "group_size", "timeout", "global_ranks_in_group", "group_id"),
        ("_DistributedBackendOptions",),
    ),
}


def _path(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _uses() -> Iterator[tuple[str, str, str]]:
    """(module, what it is asked of, attribute)"""
    for module in MODULES:
        spec = importlib.util.find_spec(f"shardkit.backends.{module}")
        assert spec is not None
        assert spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = _path(node.value)
            if re.match(r"dist(\.|$)|torch\.(cuda|accelerator)(\.|$)", owner):
                yield module, re.sub("^dist", "torch.distributed", owner), node.attr
            elif module in ("c10d.group", "accelerator") and owner == "options":
                for name in OPTION_CLASSES[node.attr]:
                    yield module, f"torch._C._distributed_c10d.{name}", node.attr
            else:
                for stands_for in STANDS_FOR.get((module, owner), ()):
                    yield module, stands_for, node.attr


def _named(path: str) -> Any:
    found: Any = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_everything_used_is_there() -> None:
    uses = set(_uses())
    missing = [use for use in sorted(uses) if not hasattr(_named(use[1]), use[2])]
    assert not missing
    asked = {(owner.rpartition(".")[2], name) for _, owner, name in uses}
    assert {
        ("ProcessGroup", "_allgather_base"),
        ("ProcessGroup", "abort"),
        ("ProcessGroup", "_get_backend"),
        ("ProcessGroupNCCL", "eager_connect_single_device"),
        ("Options", "global_ranks_in_group"),
        ("ReduceOptions", "rootRank"),
        ("accelerator", "set_device_index"),
        ("Work", "wait"),
        ("accelerator", "current_stream"),
    } <= asked, "the source is not read as it should be"


def _overloads(method: Any) -> list[str]:
    """The signatures in a binding's docstring, with types as the oldest supported torch spells them."""
    text = method.__doc__.replace("collections.abc.Sequence", "list")
    text = re.sub(r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int", text)
    text = text.replace("backend: object = None", "backend: Optional[c10d::Backend] = None")  # torch 2.15
    found = re.findall(r"\((self: .*)\) -> ", text)
    return [
        re.sub(r"torch\._C\._distributed_c10d\.|torch\.distributed\.distributed_c10d\.", "", line)
        for line in found
    ]


TENSORS = "list[torch.Tensor]"
SIGNATURES = {
    (PROCESS_GROUP, "allreduce"): (TENSORS, "AllreduceOptions"),
    (PROCESS_GROUP, "reduce"): (TENSORS, "ReduceOptions"),
    (PROCESS_GROUP, "broadcast"): ("torch.Tensor", "int"),
    (PROCESS_GROUP, "allgather"): (f"list[{TENSORS}]", TENSORS),
    (PROCESS_GROUP, "_allgather_base"): ("torch.Tensor", "torch.Tensor"),
    (PROCESS_GROUP, "reduce_scatter"): (TENSORS, f"list[{TENSORS}]", "ReduceScatterOptions"),
    (PROCESS_GROUP, "_reduce_scatter_base"): ("torch.Tensor", "torch.Tensor", "ReduceScatterOptions"),
    (PROCESS_GROUP, "alltoall_base"): ("torch.Tensor", "torch.Tensor", "list[int]", "list[int]"),
    (PROCESS_GROUP, "_set_default_backend"): ("c10d::ProcessGroup::BackendType",),
    (PROCESS_GROUP, "_register_backend"): (
        "torch.device",
        "c10d::ProcessGroup::BackendType",
        "c10d::Backend",
    ),
    (PROCESS_GROUP, "_get_backend"): ("torch.device",),
    (PROCESS_GROUP, "_set_group_name"): ("str",),
    (PROCESS_GROUP, "_set_group_desc"): ("str",),
    (PROCESS_GROUP, "abort"): (),
    (NCCL, "__init__"): ("Store", "int", "int", "c10d::ProcessGroupNCCL::Options"),
    (NCCL, "eager_connect_single_device"): ("torch.device",),
    (NCCL, "name"): (),
    ("torch.distributed.Work", "is_completed"): (),
    ("torch.distributed.Work", "wait"): ("datetime.timedelta",),
}


@pytest.mark.parametrize(("owner", "name"), SIGNATURES, ids=lambda value: value.rpartition(".")[2])
def test_signatures(owner: str, name: str) -> None:
    overloads = _overloads(getattr(_named(owner), name))
    wanted = SIGNATURES[owner, name]
    pattern = r"self: [\w.]+" + "".join(
        rf", \w+: (\w+::|Optional\[)*{re.escape(kind)}[^,]*" for kind in wanted
    )
    takes = [line for line in overloads if re.match(rf"{pattern}(, \w+: [^=]* = .*)?$", line)]
    assert takes, overloads


def test_options_are_taken() -> None:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=7)
    options.global_ranks_in_group = [3, 5]
    options.group_name = "shardkit/0/channel/parameters/1"
    assert options._timeout == datetime.timedelta(seconds=7)
    assert options.global_ranks_in_group == [3, 5]
    assert options.group_name == "shardkit/0/channel/parameters/1"
    assert isinstance(dist.ProcessGroupNCCL.options, property)  # whose _timeout is read
    for op in streams._OPS.values():
        for name in OPTION_CLASSES["reduceOp"]:
            given = getattr(torch._C._distributed_c10d, name)()
            given.reduceOp = op
            assert given.reduceOp == op


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_only_the_device_is_missing() -> None:
    store, options = dist.HashStore(), dist.ProcessGroupNCCL.Options()
    with pytest.raises(ValueError, match="no GPUs found"):
        dist.ProcessGroupNCCL(store, 0, 1, options)
    assert dist.ProcessGroup.BackendType.NCCL is not None


def test_device_module() -> None:
    cuda, device = torch.get_device_module("cuda"), torch.device("cuda", 0)
    assert cuda is torch.cuda
    inspect.signature(torch.accelerator.synchronize).bind(device)
    inspect.signature(cuda.get_rng_state).bind(device)
    inspect.signature(cuda.set_rng_state).bind(torch.empty(0), device)
    inspect.signature(torch.accelerator.current_stream).bind(device)


_DTYPES = {
    "Char": torch.int8, "Byte": torch.uint8, "Float": torch.float32, "Double": torch.float64, "Int": torch.int32,
    "Long": torch.int64, "Half": torch.float16, "Bool": torch.bool, "BFloat16": torch.bfloat16,
}  # fmt: skip


def test_dtypes_are_those_of_the_header() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/NCCLUtils.hpp"
    table = re.search(r"ncclDataType = \{(.*?)\n\};", header.read_text(), re.DOTALL)
    assert table
    names = set(re.findall(r"\{at::k(\w+), nccl", table[1]))
    assert {_DTYPES[n] for n in names if not n.startswith("Float8")} == streams._DTYPES
