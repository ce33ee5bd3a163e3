"""The same training in one process, with fairscale and with shardkit: where do they part, and who is with the truth?

What is trained is an experiment: a model, its data, its loss, its optimizer, as functions that every process can call.
``shardkit verify`` is :func:`verify` on the command line.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from shardkit.backends.processes import RankPool
from shardkit.compat import install
from shardkit.errors import ConfigurationError, RankFailedError

from ...backend import backend_of_job
from ...fsdp import FSDP, fully_shard, sharding_of
from ...oss.sharded_ddp import ShardedDDP
from ...policy import ReducePolicy
from ...torch_seams.tensors import differing
from ...tracing.tables import counted
from ...types import Kwargs, SavedState, StateDict, Tree

__all__ = ["EXACT", "Difference", "Experiment", "Moment", "Parting", "Report", "Side", "Tolerance", "Trace"]
__all__ += ["Verifier", "check_named", "check_numbers", "check_optimizer_state", "check_tensor"]
__all__ += ["check_value", "first_parting", "tolerance_of", "verify"]

# ------------------------------------------------------------ what two runs saw, compared
# Numbers, tensors, state dicts; the first difference is an error.


@dataclass(frozen=True)
class Tolerance:
    """Two values agree where they are within ``absolute + relative * |expected|``, element by element.

    Where both are 0, all bits have to be equal.
    """

    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
DOUBLE = Tolerance(1e-9, 1e-11)
SINGLE = Tolerance(2e-5, 2e-6)
HALF = Tolerance(3e-2, 6e-3)
BFLOAT = Tolerance(1e-1, 3e-2)
_OF_DTYPE = {torch.float64: DOUBLE, torch.float32: SINGLE, torch.float16: HALF, torch.bfloat16: BFLOAT}


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """Returns what rounding may do to a few steps of training that compute in ``dtype``."""
    return _OF_DTYPE.get(dtype, SINGLE)


class Difference(AssertionError):
    """Two runs disagree; the message says where, by how much, and shows values of both.

    Attributes:
        where: what differs.
        gap: largest absolute difference; nan where sizes, types or names differ.
    """

    def __init__(self, where: str, message: str, gap: float = math.nan) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
        self.gap = gap


def dense(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    return t.to_dense() if t.is_sparse else t


def check_tensor(where: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    """Raises Difference unless shapes and dtypes are the same and values agree."""
    got, want = dense(got), dense(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Difference(where, f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}")
    if tolerance == EXACT:
        flat = [t.flatten().contiguous() for t in (got, want) if t.numel()]
        bits = [t.view(torch.uint8).view(t.numel(), -1) for t in flat]
        differs = (bits[0] != bits[1]).any(1) if bits else torch.zeros(0)
        if differs.any():
            k = int(differs.int().argmax())
            a, b = (t[k].item() for t in flat)
            raise Difference(f"{where}, element {k}", f"{a!r} instead of {b!r}", float(abs(a - b)))
        return
    if torch.equal(got, want):
        return
    if not (want.is_floating_point() or want.is_complex()):
        raise Difference(where, f"{got} instead of {want}")
    wide = torch.complex128 if want.is_complex() else torch.float64
    if torch.allclose(got.to(wide), want.to(wide), tolerance.relative, tolerance.absolute, equal_nan=True):
        return
    _, gap = differing(got, want)
    shown = f"\n  got  {got.flatten()[:8]}\n  want {want.flatten()[:8]}"
    raise Difference(where, f"differs by {gap:.3g}{shown}", gap)


def check_numbers(where: str, got: Sequence[float], want: Sequence[float], tolerance: Tolerance) -> None:
    """Does the same for plain numbers; nan agrees with nan."""
    check_value(where, [*map(float, got)], [*map(float, want)], tolerance)


def check_named(
    where: str,
    got: Mapping[str, torch.Tensor | None],
    want: Mapping[str, torch.Tensor | None],
    tolerance: Tolerance,
    only_got: bool = False,
) -> None:
    """Does the same for tensors by name, in ``got``'s order; None (no gradient, say) agrees with None only.

    Args:
        only_got: names that ``got`` lacks are not looked at (a rank reports its own part).
    """
    if not only_got and set(got) != set(want):
        raise Difference(where, f"names {sorted(got)} instead of {sorted(want)}")
    for name, value in got.items():
        check_value(f"{where} of {name}", value, want[name], tolerance)


def check_value(where: str, got: Tree, want: Tree, tolerance: Tolerance) -> None:
    """Does the same for nested dicts, lists and tuples of tensors and plain values, such as state dicts."""
    if isinstance(want, (list, tuple)) and isinstance(got, type(want)) and len(got) == len(want):
        got, want = dict(enumerate(got)), dict(enumerate(want))
    if isinstance(want, dict) and isinstance(got, dict) and set(got) == set(want):
        for key in want:
            check_value(f"{where}[{key!r}]", got[key], want[key], tolerance)
    elif isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        check_tensor(where, got, want, tolerance)
    elif isinstance(want, float) and isinstance(got, float):
        relative = 0.0 if tolerance == EXACT else max(tolerance.relative, 1e-12)
        is_close = math.isclose(got, want, rel_tol=relative, abs_tol=tolerance.absolute)
        if not is_close and not (math.isnan(got) and math.isnan(want)):
            raise Difference(where, f"{got} instead of {want}", abs(got - want))
    elif any(isinstance(value, dict | torch.Tensor) for value in (got, want)) or got != want:
        raise Difference(where, f"{got!r:.300} instead of {want!r:.300}")


def check_optimizer_state(where: str, got: StateDict, want: StateDict, tolerance: Tolerance) -> None:
    """Does so for optimizer state dicts in torch's format, whose states have to come in the order of parameters."""
    if set(got) != set(want):
        raise Difference(where, f"keys {sorted(got)} instead of {sorted(want)}")
    if list(got["state"]) != sorted(want["state"]):
        raise Difference(where, f"states of {list(got['state'])} instead of {sorted(want['state'])}")
    for index, state in got["state"].items():
        check_value(f"{where}, state of parameter {index}", state, want["state"][index], tolerance)
    check_value(f"{where}, groups", got["param_groups"], want["param_groups"], tolerance)


# ------------------------------------------------------------ what runs saw
Tensors = dict[str, torch.Tensor]


@dataclass
class Moment:
    """One step of a run, under the plain model's names.

    Attributes:
        losses: of each micro-batch; of each rank, where these have one.
        gradients: mean over ranks, complete; zeros for a parameter that got none.
        parameters: after the optimizer's step, complete.
        buffers: rank 0's, after the step.
    """

    losses: list[float]
    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


Trace = list[Moment]


@dataclass(frozen=True)
class Parting:
    """The first place where a run leaves another one.

    Attributes:
        step: counted from 0.
        what: "loss of micro-batch 1", "gradient of 0.weight", "value of 0.weight", "buffer ..."; ", element 3" where
            bits are compared.
        gap: largest absolute difference there; nan where names, shapes or dtypes differ.
        detail: values of both.
    """

    step: int
    what: str
    gap: float
    detail: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.what}, by {self.gap:.3g}"


def first_parting(got: Sequence[Moment], want: Sequence[Moment], tolerance: Tolerance) -> Parting | None:
    """Finds where ``got`` first leaves ``want``; None if it doesn't.

    Within a step: losses, then gradients, parameters and buffers, each in the model's order.
    """
    for step, (a, b) in enumerate(zip(got, want, strict=False)):
        try:
            for k, (mine, other) in enumerate(zip(a.losses, b.losses, strict=False)):
                check_value(f"loss of micro-batch {k}", mine, other, tolerance)
            if len(a.losses) != len(b.losses):
                raise Difference("losses", f"{len(a.losses)} micro-batches instead of {len(b.losses)}")
            for what, part in (("gradient", "gradients"), ("value", "parameters"), ("buffer", "buffers")):
                check_named(what, getattr(a, part), getattr(b, part), tolerance)
        except Difference as difference:
            return Parting(step, difference.where, difference.gap, str(difference))
    if len(got) != len(want):
        detail = f"{len(got)} steps instead of {len(want)}"
        return Parting(min(len(got), len(want)), "the end", math.nan, detail)
    return None


# ------------------------------------------------------------ an experiment

Unit = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Experiment:
    """Some steps of training, said so that one process, fairscale and shardkit can all do them.

    Attributes:
        model: makes the model, on the CPU. Called after ``torch.manual_seed(seed)``; every call has to give the same
            values. It may call fairscale's or shardkit's ``wrap``: with FSDP it runs inside ``enable_wrap``.
        batch: a rank's batch at a step, ``batch(step, rank)``; the same values whenever it is called.
        loss: ``loss(model, batch)``, a scalar tensor; ranks' gradients are averaged.
        optimizer: class of the optimizer.
        wrap: ``wrap(model, unit)`` makes units of parts of the model, by ``parent.part = unit(parent.part)``, before
            the whole is made one; None: only the whole is one.
        clip: gradients are clipped to this 2-norm before each optimizer step; None: they are not.
        seed: of start values; dropout masks depend on it, the step and the rank.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Tree]
    loss: Callable[[nn.Module, Tree], torch.Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    optimizer_options: SavedState = field(default_factory=lambda: {"lr": 0.1})
    wrap: Callable[[nn.Module, Unit], None] | None = None
    clip: float | None = None
    seed: int = 0

    def build(self) -> nn.Module:
        """Returns the model with its start values."""
        torch.manual_seed(self.seed)
        return self.model()

    def loss_of(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Returns the loss of a rank's batch, with dropout masks of its own."""
        batch = self.batch(step, rank)
        torch.manual_seed((self.seed * 1009 + step) * 1009 + rank)
        return self.loss(model, batch)

    def optimizer_over(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the plain optimizer."""
        return self.optimizer(parameters, **self.optimizer_options)  # type: ignore[arg-type]


def load_experiment(target: str) -> Experiment:
    """Loads what ``script.py:name`` or ``package.module:name`` gives: an Experiment, or a function that makes one."""
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise ConfigurationError(f"{target!r} has to be script.py:name or package.module:name")
    found = _module(source)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{source} has no {name!r}; name a function that returns an Experiment")
        found = getattr(found, part)
    made = found if isinstance(found, Experiment) else found() if callable(found) else found
    if not isinstance(made, Experiment):
        raise ConfigurationError(
            f"{target} gives a {type(made).__name__}; it has to give a shardkit.tools.verify.Experiment"
        )
    return made


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is not None and not source.startswith(error.name):
                raise  # something that it imports
            raise ConfigurationError(f"no module {source!r}; for a file, write {source}.py:name") from error
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigurationError(f"no file {source!r}")
    name = f"_verified_{path.stem}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"{source!r} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# ------------------------------------------------------------ the truth
def run_in_one_process(
    experiment: Experiment, world_size: int, steps: int, buffers_follow_rank_0: bool
) -> Trace:
    """Shows what ranks should see: gradients are the mean over their batches, buffers are each rank's own.

    Args:
        buffers_follow_rank_0: as DistributedDataParallel and ShardedDataParallel keep them.
    """
    model = experiment.build()
    shared = {id(p): p for p in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(world_size - 1))]
    optimizer = experiment.optimizer_over(model.parameters())
    named = dict(model.named_parameters())
    trace = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if buffers_follow_rank_0:
            source = dict(model.named_buffers())
            for name, buffer in (item for replica in models[1:] for item in replica.named_buffers()):
                buffer.data.copy_(source[name])
        losses = []
        for rank, replica in enumerate(models):
            loss = experiment.loss_of(replica, step, rank)
            (loss / world_size).backward()
            losses.append(loss.item())
        gradients = {n: gradient_of(p) for n, p in named.items()}
        if experiment.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), experiment.clip)
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in named.items()}
        trace.append(Moment(losses, gradients, parameters, persistent_buffers(model)))
    return trace


def gradient_of(p: nn.Parameter) -> torch.Tensor:
    """Copies a parameter's gradient; zeros where it got none."""
    return torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies the buffers that state dicts have."""
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {n: v.detach().clone() for n, v in state.items() if n not in names and isinstance(v, torch.Tensor)}


# ------------------------------------------------------------ the three beside each other
SECONDS = 600.0


@dataclass(frozen=True)
class Side:
    """How one library's run compares with the truth.

    Attributes:
        parting: where it first leaves the truth; None: nowhere.
        largest: largest absolute difference of any gradient or parameter; None if it parted or failed.
        failure: the error, with the rank's traceback, that ended the run; "" if none did.
    """

    library: str
    parting: Parting | None = None
    largest: float | None = None
    failure: str = ""

    @property
    def agrees(self) -> bool:
        return self.parting is None and not self.failure

    def __str__(self) -> str:
        if self.failure:
            return f"{self.library} failed: {self.failure.strip().splitlines()[-1]}"
        if self.parting is not None:
            return f"{self.library} leaves one process at {self.parting}"
        if self.largest == 0.0:
            return f"{self.library} agrees with one process to the bit"
        return f"{self.library} agrees with one process (largest difference {self.largest:.2g})"


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify`.

    Attributes:
        tolerance: EXACT where bits were compared.
        sides: shardkit's run, and fairscale's where it is installed.
        between: where the two libraries first part from each other; None: nowhere, or there are no two runs.
    """

    target: str
    strategy: str
    world_size: int
    steps: int
    tolerance: Tolerance
    sides: tuple[Side, ...]
    between: Parting | None = None

    @property
    def agrees(self) -> bool:
        """Says whether shardkit is with the truth."""
        return self.sides[0].agrees

    def __str__(self) -> str:
        size = f"{counted(self.steps, 'step')} on {counted(self.world_size, 'rank')}"
        head = f"{self.target}: {size} with {self.strategy}"
        lines = [head, *(f"  {side}" for side in self.sides)]
        if len(self.sides) == 1:
            why = "fairscale is not installed"
            if self.tolerance == EXACT:
                why = "fairscale has no fixed order of sums"
            elif self.strategy == "fully_shard":
                why = "fairscale has no fully_shard"
            lines.append(f"  {why}: not compared with it")
        elif self.between is not None:
            with_truth = [s.library for s in self.sides if s.agrees]
            lines.append(
                f"  the two part at {self.between}; with one process: {', '.join(with_truth) or 'neither'}"
            )
        for side in self.sides:
            if side.parting is not None:
                lines.append(f"  {side.library}, {side.parting.detail}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Task:
    """A task for all processes; plain data.

    Attributes:
        options: arguments of OSS ("oss"), ShardedDataParallel or FullyShardedDataParallel, under fairscale's names, or
            of fully_shard, which is shardkit's alone. With ``reduce`` among them, of shardkit's own wrappers.
        microbatches: of a step, over all ranks.
    """

    target: str
    strategy: Strategy
    world_size: int
    steps: int
    options: Kwargs
    microbatches: int


class Verifier:
    """Processes in which experiments are compared, kept for further ones; see :func:`verify`. A context manager."""

    def __init__(self, world_size: int = 2) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._alone = RankPool(1, timeout=SECONDS)
        self._ranks: dict[Library, RankPool] = {"shardkit": RankPool(world_size, timeout=SECONDS)}
        if importlib.util.find_spec("fairscale") is not None:
            from .fairscale_ranks import start_rank

            self._ranks["fairscale"] = RankPool(world_size, start=start_rank, timeout=SECONDS)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._alone, *self._ranks.values()):
            pool.close()

    def verify(
        self,
        experiment: Callable[[], Experiment] | str,
        *,
        strategy: Strategy = "fsdp",
        steps: int = 3,
        options: SavedState | None = None,
        tolerance: Tolerance | None = None,
        bits: bool = False,
    ) -> Report:
        """Does :func:`verify` in these processes.

        Raises:
            ConfigurationError: the strategy is unknown, or has no fixed order of sums; or there are no steps.
        """
        if strategy not in get_args(Strategy):
            raise ConfigurationError(
                f"strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"
            )
        if steps < 1:
            raise ConfigurationError(f"steps must be at least 1, got {steps}")
        target = experiment  # by which other processes find it
        if not isinstance(target, str):
            target = f"{target.__module__}:{target.__qualname__}"
        given, count = dict(options or {}), self.world_size
        if bits and strategy == "oss":
            raise ConfigurationError(
                "--bits: under DistributedDataParallel sums have no fixed order; take sharded_ddp"
            )
        if bits:
            count *= 2
            policy: ReducePolicy = given.get("reduce", ReducePolicy())
            given["reduce"] = replace(policy, order="fixed", microbatches=count)
        task = _Task(target, strategy, self.world_size, steps, given, count)
        truth: Trace = pickle.loads(self._alone.run(_run, "shardkit" if bits else None, task)[0])
        chosen = EXACT if bits else tolerance or tolerance_of(_dtype(truth, given))
        traces: dict[Library, Trace] = {}
        sides = []
        for library, pool in self._ranks.items():
            if library == "fairscale" and (bits or strategy == "fully_shard"):
                continue  # it has no such thing
            try:
                got = traces[library] = pickle.loads(pool.run(_run, library, task)[0])
                parting = first_parting(got, truth, chosen)
                gaps = [  # of any gradient or parameter
                    differing(dense(tensor), dense(other[name]))[1]
                    for a, b in (zip(got, truth, strict=True) if parting is None else ())
                    for mine, other in ((a.gradients, b.gradients), (a.parameters, b.parameters))
                    for name, tensor in mine.items()
                ]
                sides.append(Side(library, parting, max(gaps, default=0.0) if parting is None else None))
            except RankFailedError as error:
                sides.append(Side(library, failure=error.remote_traceback))
        between = first_parting(traces["shardkit"], traces["fairscale"], chosen) if len(traces) == 2 else None
        return Report(target, strategy, self.world_size, steps, chosen, tuple(sides), between)


def verify(
    experiment: Callable[[], Experiment] | str,
    *,
    strategy: Strategy = "fsdp",
    world_size: int = 2,
    steps: int = 3,
    options: SavedState | None = None,
    tolerance: Tolerance | None = None,
    bits: bool = False,
) -> Report:
    """Trains a few steps in one process, with shardkit, and with fairscale if installed, and compares what they saw.

    Ranks are processes of this machine, on the CPU over gloo. fairscale's FSDP, which asks for CUDA, runs there on a
    stand-in for what it asks of ``torch.cuda``. In all other processes ``import fairscale`` gives shardkit, so that
    a model written for fairscale is the same model everywhere.

    Args:
        experiment: a function of a module that returns an :class:`Experiment`, or where it is:
            "script.py:name" or "package.module:name".
        strategy: "oss" (under torch's DistributedDataParallel), "sharded_ddp", "fsdp" or "fully_shard".
        world_size: number of ranks.
        steps: how many steps.
        options: arguments of OSS ("oss") or of the wrapper, under fairscale's names; of fully_shard, under its own.
        tolerance: what counts as the same; default: by the dtype that the model computes in.
        bits: all bits have to be those of one rank that runs the same micro-batches, two for each rank, with
            ``ReducePolicy(order="fixed")``. ``batch`` and dropout are asked for micro-batches' numbers in place of
            ranks'; options are those of shardkit's wrappers.

    Raises:
        ConfigurationError: an argument can't be right.
        RankFailedError: it can't even be run in one process, or there is no such experiment.
    """
    with Verifier(world_size) as verifier:
        return verifier.verify(
            experiment, strategy=strategy, steps=steps, options=options, tolerance=tolerance, bits=bits
        )


def _dtype(truth: Trace, options: SavedState) -> torch.dtype:
    found = {t.dtype for t in truth[0].parameters.values() if t.is_floating_point()}
    if options.get("mixed_precision"):
        found.add(options.get("compute_dtype") or torch.float16)
    found |= {torch.float16 for name in ("reduce_fp16", "broadcast_fp16") if options.get(name)}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _run(rank: int, library: Library | None, task: _Task) -> bytes:
    """Runs a task as a rank, or in one process where there is no library.

    Pickled: tensors in a pipe between processes would travel as file descriptors.
    """
    if library != "fairscale":
        install()  # "import fairscale" gives shardkit
    experiment = load_experiment(task.target)
    if library is not None:
        return pickle.dumps(run_on_ranks(experiment, library, task))
    follows = task.strategy in ("oss", "sharded_ddp")
    return pickle.dumps(run_in_one_process(experiment, task.world_size, task.steps, follows))


# ------------------------------------------------------------ an experiment on real ranks
Strategy = Literal["oss", "sharded_ddp", "fsdp", "fully_shard"]
Library = Literal["fairscale", "shardkit"]


def run_on_ranks(experiment: Experiment, library: Library, task: _Task) -> Trace:
    """Returns what the ranks saw, the same on each of them. Needs a process group."""
    kinds: dict[str, type[_Wholes | _Shards]] = {"fsdp": _Shards, "fully_shard": _FullySharded}
    run = kinds.get(task.strategy, _Wholes)(experiment, library, task.strategy, dict(task.options))
    rank, world, trace = dist.get_rank(), dist.get_world_size(), []
    for step in range(task.steps):
        run.wrapper.zero_grad(set_to_none=True)
        losses = []
        for k in range(rank, task.microbatches, world):
            loss = experiment.loss_of(run.wrapper, step, k)
            loss.backward()
            losses.append(loss.item())
        losses = [loss for one_of_each in zip(*_of_all(losses), strict=True) for loss in one_of_each]
        gradients = run.gradients()
        if experiment.clip is not None:
            run.clip(experiment.clip)
        run.optimizer.step()
        trace.append(Moment(losses, gradients, *run.values()))
    return trace


class _Wholes:
    """OSS under DistributedDataParallel or ShardedDataParallel: whole parameters, each with an owner."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        self.module = experiment.build()
        oss = importlib.import_module(f"{library}.optim.oss").OSS
        more = options if strategy == "oss" else {}
        self.optimizer: Any = oss(
            self.module.parameters(), optim=experiment.optimizer, **more, **experiment.optimizer_options
        )
        self.wrapper: nn.Module
        if strategy == "oss":
            self.wrapper = nn.parallel.DistributedDataParallel(self.module, find_unused_parameters=True)
        else:
            fairscales = importlib.import_module(f"{library}.nn.data_parallel").ShardedDataParallel
            wrapper = ShardedDDP if "reduce" in options else fairscales
            self.wrapper = wrapper(self.module, self.optimizer, **options)
        self.clip = self.optimizer.clip_grad_norm

    def gradients(self) -> Tensors:
        owners, rank = self.optimizer._param_to_rank, dist.get_rank()
        mine = {n: gradient_of(p) for n, p in self.module.named_parameters() if owners.get(p, 0) == rank}
        found = {n: g for part in _of_all(mine) for n, g in part.items()}
        return {n: found[n] for n, _ in self.module.named_parameters()}

    def values(self) -> tuple[Tensors, Tensors]:
        parameters = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        return parameters, _of_rank_0(persistent_buffers(self.module))


class _Shards:
    """FullyShardedDataParallel: nothing is whole but while it computes."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        plain = experiment.build()
        self._parameters = [n for n, _ in plain.named_parameters()]
        self._buffers = list(persistent_buffers(plain))
        fairscales = importlib.import_module(f"{library}.nn.data_parallel").FullyShardedDataParallel
        fsdp: Any = FSDP if "reduce" in options else fairscales
        if library == "fairscale":
            options["compute_device"] = torch.device("cpu")  # it would look for another one
        wrapping = importlib.import_module(f"{library}.nn.wrap")
        with wrapping.enable_wrap(wrapper_cls=fsdp, **options):
            module = experiment.build()
            if experiment.wrap is not None:
                experiment.wrap(module, wrapping.wrap)
        self.wrapper: Any = module if isinstance(module, fsdp) else fsdp(module, **options)
        self.optimizer = experiment.optimizer_over(self.wrapper.parameters())
        self.clip = self.wrapper.clip_grad_norm_

    @torch.no_grad()
    def gradients(self) -> Tensors:
        """Puts the gradients in the place of the parameters for as long as it takes to see them whole."""
        shards = list(self.wrapper.parameters())
        values = [p.detach().clone() for p in shards]
        for p in shards:
            p.zero_() if p.grad is None else p.copy_(p.grad)
        found, _ = self.values()
        for p, value in zip(shards, values, strict=True):
            p.copy_(value)
        return found

    def values(self) -> tuple[Tensors, Tensors]:
        state = self.wrapper.state_dict()
        if not state:  # state_dict_on_rank_0_only
            state = dict.fromkeys([*self._parameters, *self._buffers], torch.empty(0))
        state = {n: _plain(v) for n, v in state.items()}
        parameters = _of_rank_0({n: state[n] for n in self._parameters})
        return parameters, _of_rank_0({n: state[n] for n in self._buffers})


class _FullySharded(_Shards):
    """fully_shard: what ``summon_full_params`` shows of the shards is whole."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        self.wrapper = experiment.build()
        if experiment.wrap is not None:
            experiment.wrap(self.wrapper, lambda part, **more: fully_shard(part, **{**options, **more}))
        fully_shard(self.wrapper, **options)
        self.optimizer = experiment.optimizer_over(self.wrapper.parameters())
        self.clip = sharding_of(self.wrapper).clip_grad_norm_

    def values(self) -> tuple[Tensors, Tensors]:
        with sharding_of(self.wrapper).summon_full_params(writeback=False):
            parameters = {n: p.detach().clone() for n, p in self.wrapper.named_parameters()}
        buffers = {n: b.detach().clone() for n, b in self.wrapper.named_buffers()}
        return parameters, _of_rank_0(buffers)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU without the attributes that libraries put on tensors."""
    return torch.empty_like(t, device="cpu").copy_(t.detach())


def _of_all(value: object) -> list[Tree]:
    return backend_of_job().group().all_gather_object(value)


def _of_rank_0(tensors: Tensors) -> Tensors:
    return backend_of_job().group().broadcast_object(tensors, 0)
