"""A process group of torch's over simulated ranks: what ``torch.distributed`` and libraries on top of it call.

torch passes lists of one tensor where one is meant; lists of W tensors have one for each rank. Methods have the names
and arguments that torch calls them with, from Python and from C++.

[Note: behind autograd's back] Collectives change tensors without telling autograd, as those of processes do: they
write to ``tensor.data``, which has a version counter of its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from operator import attrgetter
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from shardkit.errors import ConfigurationError
from shardkit.types import Args, Kwargs, Tree

from .. import simulated as compute
from . import SimulatedGroup, SimulatedWork


class ThreadWork(dist.Work):
    """Is torch's handle of a collective. Waiting gives the other ranks their turn.

    Args:
        parts: what to wait for.
    """

    def __init__(self, parts: Sequence[SimulatedWork], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.parts, self._outputs = list(parts), list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for part in self.parts:
            part.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(part.is_done() for part in self.parts)

    is_success = is_completed

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future that is done: what waits for one in C++ would not let other ranks have their turn."""
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self._outputs)
        return future


Tensors = Sequence[Tensor]
Given = Tensors | Tensor
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)
# Its stubs list overloads that torch itself never calls, and which a Python class could not override one by one.
_Base: Tree = dist.ProcessGroup


class ProcessGroupOfThreads(_Base):  # type: ignore[misc]
    """Has torch's collectives over a group of simulated ranks.

    Args:
        below: carries everything.
    """

    supports_splitting = supports_coalescing = False  # what torch asks of a group's backend

    def __init__(self, below: SimulatedGroup) -> None:
        super().__init__(below.rank, below.world_size)
        self.below = below
        self._name = self._description = ""
        self._pairs: dict[tuple[int, int, int], SimulatedGroup] = {}

    # ------------------------------------------------------------ what torch asks
    def getBackendName(self) -> str:
        return "simulated"  # whoever reads "gloo" here looks for gloo's own objects behind it

    group_name = pg_name = property(attrgetter("_name"))
    group_desc = property(attrgetter("_description"))

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> ProcessGroupOfThreads:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.below.issued

    def shutdown(self) -> None:
        """Does nothing: there is nothing to close."""

    abort = shutdown

    def __repr__(self) -> str:
        return f"<process group of simulated ranks {list(self.below.ranks)}, here rank {self.below.rank}>"

    # ------------------------------------------------------------ the same tensors on all ranks
    def allreduce(self, tensors: Given, opts: Tree = None) -> ThreadWork:
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Given, opts: Tree = None) -> ThreadWork:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, operation: str, tensors: Given, opts: Tree) -> ThreadWork:
        own, op = _listed(tensors), compute.op_name(_op(opts))
        return self._issue(
            operation, own, (op,), _behind(own), lambda all_: compute.all_reduce(all_, op), own
        )

    def broadcast(self, tensors: Given, opts: Tree = None, **kwargs: int) -> ThreadWork:
        own, root = _listed(tensors), _root(opts, kwargs)
        terms, brought = (f"from {root}",), _behind(own)
        return self._issue("broadcast", own, terms, brought, lambda all_: compute.broadcast(all_, root), own)

    def reduce(self, tensors: Given, opts: Tree = None, **kwargs: int) -> ThreadWork:
        own, root, op = _listed(tensors), _root(opts, kwargs), compute.op_name(_op(opts))
        terms, brought = (op, f"to {root}"), _behind(own)[0]
        return self._issue("reduce", own, terms, brought, lambda all_: compute.reduce(all_, op, root), own)

    def barrier(self, opts: Tree = None, **_: object) -> ThreadWork:
        return self._issue("barrier", (), (), None, lambda _: None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._issue("monitored_barrier", (), (), None, lambda _: None).wait()

    # ------------------------------------------------------------ gathering
    def allgather(
        self, output_tensors: Sequence[Given], input_tensor: Given, opts: object = None
    ) -> ThreadWork:
        outputs = [_listed(pieces) for pieces in output_tensors]
        if outputs and isinstance(output_tensors[0], Tensor):
            outputs = [list(output_tensors)]  # type: ignore[arg-type]  # one list, for one tensor
        return self._all_gather("all_gather", outputs, _listed(input_tensor))

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], input_list: Tensors, opts: object = None
    ) -> ThreadWork:
        by_input = [list(pieces) for pieces in zip(*output_lists, strict=True)]
        return self._all_gather("all_gather_coalesced", by_input, input_list)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> ThreadWork:
        return self._all_gather("all_gather_into_tensor", [self._cut(output)], [input], [output])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> ThreadWork:
        cut = [self._cut(output) for output in outputs]
        return self._all_gather("all_gather_into_tensor_coalesced", cut, inputs, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, operation: str, outputs: Sequence[Tensors], inputs: Tensors, result: Tensors | None = None
    ) -> ThreadWork:
        brought = [_behind(pieces) for pieces in outputs], _behind(inputs)
        given = [piece for pieces in outputs for piece in pieces] if result is None else result
        return self._issue(
            operation, inputs, (), brought, compute.of_pairs(compute.all_gather), given, self.below.world_size
        )

    def gather(
        self, output_tensors: Sequence[Tensors], input_tensors: Given, opts: Tree = None
    ) -> ThreadWork:
        own, lists = _listed(input_tensors), [_behind(pieces) for pieces in output_tensors]  # on one rank
        finish, terms = compute.of_pairs(compute.all_gather), (f"to {_root(opts)}",)
        return self._issue("gather", own, terms, (lists, _behind(own)), finish, lists[0] if lists else ())

    # ------------------------------------------------------------ a part for each rank
    def reduce_scatter(
        self, output_tensors: Given, input_tensors: Sequence[Tensors], opts: Tree = None
    ) -> ThreadWork:
        pieces = input_tensors if isinstance(input_tensors[0], Tensor) else input_tensors[0]
        return self._reduce_scatter("reduce_scatter", _listed(output_tensors)[0], list(pieces), opts)  # type: ignore[arg-type]

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Tree = None) -> ThreadWork:
        return self._reduce_scatter("reduce_scatter_tensor", output, self._cut(input), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Tree = None
    ) -> ThreadWork:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return ThreadWork([part for work in works for part in work.parts], outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, operation: str, output: Tensor, pieces: Tensors, opts: Tree) -> ThreadWork:
        op, brought = compute.op_name(_op(opts)), (output.data, _behind(pieces))
        return self._issue(
            operation, pieces, (op,), brought, compute.of_pairs(compute.reduce_scatter, op), [output]
        )

    def scatter(
        self, output_tensors: Given, input_tensors: Sequence[Tensors], opts: Tree = None
    ) -> ThreadWork:
        own, root = _listed(output_tensors), _root(opts)
        brought = own[0].data, _behind(input_tensors[0]) if input_tensors else []
        return self._issue(
            "scatter", own, (f"from {root}",), brought, compute.of_pairs(compute.scatter, root), own
        )

    # ------------------------------------------------------------ each with each
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: object = None) -> ThreadWork:
        return self._all_to_all("all_to_all", output_tensors, input_tensors, output_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: object = None,
    ) -> ThreadWork:
        come, go = self._rows(output, output_sizes), self._rows(input, input_sizes)
        return self._all_to_all("all_to_all_single", come, go, [output])

    alltoall_base = all_to_all_single

    def _all_to_all(self, operation: str, come: Tensors, go: Tensors, outputs: Tensors) -> ThreadWork:
        numel, itemsize = sum(piece.numel() for piece in go), go[0].element_size()
        brought, finish = (_behind(come), _behind(go)), compute.of_pairs(compute.all_to_all)
        work = self.below._issue(operation, numel, "", (str(go[0].dtype),), brought, finish, True, itemsize)
        return ThreadWork([work], outputs)

    # ------------------------------------------------------------ two ranks
    def send(self, tensors: Given, dst: int, tag: int) -> ThreadWork:
        return self._between("send", self.below.rank, int(dst), int(tag), _listed(tensors))

    def recv(self, tensors: Given, src: int, tag: int) -> ThreadWork:
        return self._between("recv", int(src), self.below.rank, int(tag), _listed(tensors))

    def recv_anysource(self, tensors: Given, tag: int) -> ThreadWork:
        raise ConfigurationError(
            f"rank {self.below.rank}: simulated ranks can't receive from any rank; name the sender, as in "
            "recv(tensor, src=0)"
        )

    def _between(self, operation: str, source: int, destination: int, tag: int, own: Tensors) -> ThreadWork:
        if source == destination:
            raise ConfigurationError(f"rank {self.below.rank}: {operation} to itself, which gloo refuses too")
        key = source, destination, tag
        if key not in self._pairs:
            self._pairs[key] = self.below.between(*key)
        sent = own[0].data

        def finish(all_: list[Tree]) -> None:
            all_[1].copy_(all_[0].reshape(all_[1].shape))

        terms = str(sent.dtype), sent.numel()
        work = self._pairs[key]._issue(
            operation, sent.numel(), "", terms, sent, finish, True, sent.element_size(), either=True
        )
        return ThreadWork([work], own)

    # ------------------------------------------------------------ helpers
    def _issue(
        self,
        operation: str,
        carried: Tensors,
        terms: tuple[object, ...],
        brought: Tree,
        finish: Callable[[list[Tree]], object],
        outputs: Tensors = (),
        share: int = 1,
    ) -> ThreadWork:
        """Runs a collective over ``carried``, which have to be alike on all ranks, and are 1/share of what there is."""
        for tensor in carried:
            if tensor.layout is not torch.strided:
                raise ConfigurationError(
                    f"rank {self.below.rank}: {operation} of a {tensor.layout} tensor between simulated ranks; make it "
                    "dense before"
                )
        alike = tuple((str(t.dtype), t.numel()) for t in carried)
        numel = sum(t.numel() for t in carried) * share
        itemsize = carried[0].element_size() if carried else 1
        work: SimulatedWork = self.below._issue(
            operation, numel, "", (*terms, *alike), brought, finish, True, itemsize
        )
        return ThreadWork([work], outputs)

    def _cut(self, whole: Tensor) -> list[Tensor]:
        world_size = self.below.world_size
        if whole.numel() % world_size or not whole.is_contiguous():
            raise ConfigurationError(
                f"rank {self.below.rank}: a tensor of shape {tuple(whole.shape)} and strides {whole.stride()} can't be "
                f"cut evenly over {world_size} ranks"
            )
        return list(whole.data.view(-1).split([whole.numel() // world_size] * world_size))

    def _rows(self, whole: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        """Cuts a tensor into the rows that go to or come from each rank."""
        if sizes:
            return list(whole.data.split(list(sizes)))
        world_size = self.below.world_size
        if whole.size(0) % world_size:
            raise ConfigurationError(
                f"rank {self.below.rank}: {whole.size(0)} rows can't be split evenly over {world_size} ranks; pass the "
                "sizes"
            )
        return list(whole.data.split([whole.size(0) // world_size] * world_size))


def _listed(tensors: Given) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _behind(tensors: Tensors) -> list[Tensor]:
    """Returns tensors that write past autograd, see [Note: behind autograd's back]."""
    return [tensor.data for tensor in tensors]


def _op(opts: Tree) -> Tree:
    """Returns the reduction of options, or what was given in their place."""
    return _SUM if opts is None else getattr(opts, "reduceOp", opts)


def _root(opts: Tree, kwargs: dict[str, int] | None = None) -> int:
    root: Tree = (kwargs or {}).get("root", 0) if opts is None else getattr(opts, "rootRank", opts)
    return int(root)


# ------------------------------------------------------------ devices
# For scripts that say "cuda" where there is none, or not one for each simulated rank: it means the CPU. Tensors and
# modules that go to the device stay where they are; what the script asks of the device's library (its memory, its
# streams' end) has the answer of a device that does nothing.
_CPU = torch.device("cpu")
_STAY = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})
_NOTHING = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
_ZERO = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "current_device",
)


def on_host(device: Tree) -> Tree:
    """Returns the CPU for a CUDA device, in whichever way it is written; everything else as it is."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


class DevicesOnHost(TorchFunctionMode):
    """Active in a rank's thread."""

    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if func in _STAY:
            return args[0]
        if func is torch.Tensor.to:
            args = args[0], *map(on_host, args[1:])
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": on_host(kwargs["device"])}
        return func(*args, **kwargs)


@contextlib.contextmanager
def host_for_devices() -> Iterator[None]:
    """Makes what no function mode sees take the CPU, too, inside."""
    without_id = functools.partial(_without, ["device_id"])
    without_ids = functools.partial(_without, ["device_ids", "output_device"])
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.nn.Module, "to", _to),
            (DistributedDataParallel, "__init__", without_ids),
            (dist.distributed_c10d, "init_process_group", without_id),
            (dist, "init_process_group", without_id),
            (dist.distributed_c10d, "barrier", without_ids),
            (dist, "barrier", without_ids),
            (device_mesh, "init_device_mesh", _mesh),
            (dist, "init_device_mesh", _mesh),
            (device_mesh.DeviceMesh, "__init__", _mesh_object),
        ):
            stack.enter_context(mock.patch.object(owner, name, _replaced(getattr(owner, name), replacement)))
        answers = dict.fromkeys(_NOTHING) | dict.fromkeys(_ZERO, 0) | {"is_available": False}
        for name, value in answers.items():
            # a new function each: torch.compile tells functions of torch's apart by what they are
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=value, **__: answer))
        stack.callback(_forget_rules)
        yield


def _forget_rules() -> None:
    """Makes torch.compile look again which functions are torch's, as init_process_group does."""
    if "torch._dynamo" in sys.modules:
        rules: Tree = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None:
            rules.clear_lru_cache()


def _replaced(before: Callable[..., Tree], by: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns a function that calls another one with the one that it takes the place of, and its arguments."""

    @functools.wraps(before)
    def replaced(*args: Tree, **kwargs: Tree) -> Tree:
        return by(before, *args, **kwargs)

    return replaced


def _to(before: Callable[..., Tree], /, module: torch.nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
    if "device" in kwargs:
        kwargs["device"] = on_host(kwargs["device"])
    return before(module, *map(on_host, args), **kwargs)


def _without(names: Sequence[str], before: Callable[..., Tree], /, *args: Tree, **kwargs: Tree) -> Tree:
    """Leaves out these arguments, which name devices."""
    for name in names:
        kwargs.pop(name, None)
    return before(*args, **kwargs)


def _mesh(before: Callable[..., Tree], /, *args: Tree, **kwargs: Tree) -> Tree:
    """Takes ``device_type``, first or by name."""
    if "device_type" in kwargs:
        kwargs["device_type"] = str(on_host(kwargs["device_type"]))
        return before(*args, **kwargs)
    return before(str(on_host(args[0])), *args[1:], **kwargs)


def _mesh_object(before: Callable[..., Tree], /, own: object, *args: Tree, **kwargs: Tree) -> None:
    _mesh(functools.partial(before, own), *args, **kwargs)
