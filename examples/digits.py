"""A small vision transformer on real handwritten digits: ``python examples/digits.py --help``.

:func:`train_epoch` is the training loop of all examples. What differs between DDP, OSS, ShardedDDP and FSDP is the
function :func:`wrap`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import shardkit
from shardkit.backend import Backend, ReduceOp, get_backend
from shardkit.types import Kwargs
from shardkit.wrapping.policies import transformer_auto_wrap_policy

STRATEGIES = ("ddp", "oss", "sharded_ddp", "fsdp")
EPOCHS = 20
ALL = "all"
ACCURACY_GOAL = 0.97  # of a full run
# Ranks add up gradients in another order than one process; over a full run fp32 differences stay below this.
LOSS_TOLERANCE = 1e-4
HELD_OUT = 360
SECONDS_BETWEEN_LINES = 5.0
# A process that torchrun started is one rank already, and runs all of this.
STARTED_RANK = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
STARTED_RANKS = int(os.environ["WORLD_SIZE"]) if STARTED_RANK is not None else None


# ------------------------------------------------------------ images
class Split(NamedTuple):
    """Images of shape [n, 1, 8, 8], fp32 in [-1, 1], and their digits of shape [n], int64."""

    images: torch.Tensor
    labels: torch.Tensor


def load() -> tuple[Split, Split]:
    """Loads scikit-learn's 1,797 digits: training images and held-out ones, drawn at random, always the same."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(8.0).sub(1.0).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return Split(images[train], labels[train]), Split(images[held_out], labels[held_out])


def batches(
    data: Split, epoch: int, seed: int, batch_size: int, rank: int, world_size: int
) -> Iterator[Split]:
    """Yields this rank's rows of each global batch of one epoch.

    The order depends on seed and epoch only, so that any number of ranks sees the same global batches.
    What doesn't fill a batch is left out: all steps have one shape, which XLA compiles once.
    """
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed * 1000 + epoch))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        mine = order[start : start + batch_size][rank::world_size]
        yield Split(data.images[mine], data.labels[mine])


# ------------------------------------------------------------ the model
class Block(nn.Module):
    """A pre-norm transformer block: x of shape [batch, tokens, dim] to the same shape."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        qkv_bias: bool = False,
        mlp_ratio: float = 4.0,
        att_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        width = int(mlp_ratio * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))
        self.att_dropout, self.mlp_dropout = att_dropout, mlp_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropped = self.att_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        return x + F.dropout(self.mlp(self.norm2(x)), self.mlp_dropout, self.training)


class DigitTransformer(nn.Module):
    """A vision transformer without dropout: images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, dim: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, dim // 2, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv2d(dim // 2, dim, kernel_size=2, stride=2),
        )
        self.positions = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


# ------------------------------------------------------------ the loop
def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: LRScheduler,
    batches: Iterable[Sequence[torch.Tensor]],
    backend: Backend,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    before_step: Callable[[int], None],
    after_step: Callable[[int, torch.Tensor], None],
) -> list[float]:
    """Trains on this rank's images once; returns the loss of each step.

    Args:
        model, optimizer, schedule: plain ones, or those of shardkit.OSS, ShardedDDP or FSDP: nothing here asks.
        batches: images [b, ...] and labels [b] on the CPU.
        backend: where this rank computes.
        loss_of: logits [b, classes] and labels [b] to a loss [].
        before_step: called with the step's index when its gradients are there.
        after_step: called with the step's index and its loss [].
    """
    device = backend.device()
    model.train()
    losses: list[torch.Tensor] = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(model(images.to(device)).float(), labels.to(device))
        loss.backward()
        before_step(len(losses))
        optimizer.step()
        schedule.step()
        backend.mark_step()  # runs what was recorded, where execution is lazy
        losses.append(loss.detach())
        after_step(len(losses) - 1, losses[-1])
    return torch.stack(losses).tolist()  # read once: reading waits for the device


def average_gradients(optimizer: Optimizer, backend: Backend) -> None:
    """Does what DDP does, in its plainest form: for models that no wrapper reduces the gradients of."""
    group = backend.group()
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter.grad is not None:
                group.all_reduce(parameter.grad, op=ReduceOp.AVG).wait()


class Progress:
    """Counts the steps of a training, and prints a line now and then.

    Args:
        title: begins each line; "" shows nothing, which is for all ranks but one.
        total: steps.
    """

    def __init__(self, title: str = "", total: int = 0) -> None:
        self._title, self._total, self._done, self._loss = title, total, 0, ""
        self._printed = time.monotonic()

    def advance(self) -> None:
        """Notes that one more step is done."""
        self._done += 1
        if time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._print()

    def show_loss(self, loss: float, *, now: bool = False) -> None:
        """Takes the latest loss for the next line, or prints one now."""
        self._loss = f", loss {loss:.4f}"
        if now:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        if self._title:
            print(f"{self._title}: step {self._done}/{self._total}{self._loss}", flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._print()


# ------------------------------------------------------------ what every rank runs
@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        strategy: "single" (one process, no wrapper) or one of STRATEGIES.
        world_size: ranks that train together.
        epochs: passes over the training images; the learning rate's schedule spans them.
        stop_after: epochs really run (fewer, to look at the first steps only).
        batch_size: images in a step, over all ranks together.
    """

    strategy: str
    backend: str
    world_size: int
    epochs: int
    stop_after: int
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.2
    label_smoothing: float = 0.1
    seed: int = 0

    def steps(self, data: Split) -> int:
        """How many steps an epoch has."""
        return len(data.labels) // self.batch_size


@dataclass
class Training:
    """What one rank saw. ``parameters``, ``gradients`` and ``state`` are bytes held after a backward."""

    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.state


class Start(NamedTuple):
    """What all ranks start from: the images and the model's weights."""

    train_set: Split
    held_out: Split
    weights: dict[str, torch.Tensor]


def prepare(seed: int) -> Start:
    """Draws it once, in the process that launches: ranks that are threads share one random generator."""
    torch.manual_seed(seed)
    return Start(*load(), weights=DigitTransformer().state_dict())


def wrap(strategy: str, model: nn.Module, job: Job, backend: Backend) -> tuple[nn.Module, Optimizer]:
    """Makes the model and the optimizer as the strategy has them; all that differs between strategies."""
    arguments: Kwargs = {"lr": job.lr, "weight_decay": job.weight_decay}
    optimizer: Optimizer
    if strategy == "fsdp":
        model = nested_fsdp(model)
    if strategy in ("single", "ddp", "fsdp"):
        optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    else:
        optimizer = shardkit.OSS(model.parameters(), torch.optim.AdamW, **arguments)
    if isinstance(optimizer, shardkit.OSS) and strategy == "sharded_ddp":
        return shardkit.ShardedDDP(model, optimizer), optimizer
    if strategy in ("ddp", "oss") and has_ddp(backend):
        return DDP(model, gradient_as_bucket_view=True), optimizer
    return model, optimizer


def nested_fsdp(model: nn.Module) -> nn.Module:
    """Makes each block a unit of its own, which is gathered while it computes; the outermost unit holds the rest."""
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    with shardkit.enable_wrap(wrapper_cls=shardkit.FSDP, auto_wrap_policy=blocks):
        return shardkit.FSDP(shardkit.auto_wrap(model))


def has_ddp(backend: Backend) -> bool:
    """Whether torch's own DDP runs there: it needs ranks that are processes, and eager tensors."""
    return backend.name in ("gloo", "cuda")


def train(rank: int, job: Job, start: Start, progress: Progress) -> Training:
    """Trains one model and tests it on the held-out images; every rank calls it, with the same job."""
    backend = get_backend(job.backend)
    device = backend.device()
    network = DigitTransformer()
    network.load_state_dict(start.weights)
    network.to(device)
    whole = list(network.parameters())
    model, optimizer = wrap(job.strategy, network, job, backend)
    schedule = OneCycleLR(optimizer, max_lr=job.lr, total_steps=job.epochs * job.steps(start.train_set))
    by_hand = job.strategy in ("ddp", "oss") and not has_ddp(backend)
    outcome = Training()

    def before_step(index: int) -> None:
        if by_hand:
            average_gradients(optimizer, backend)
        if index == 1 and not outcome.parameters:  # the second step: the optimizer has its state
            measure(outcome, whole, list(model.parameters()), optimizer, backend)

    began = time.perf_counter()
    for epoch in range(job.stop_after):
        images = batches(start.train_set, epoch, job.seed, job.batch_size, rank, job.world_size)
        loss_of = functools.partial(F.cross_entropy, label_smoothing=job.label_smoothing)
        outcome.losses += train_epoch(
            model, optimizer, schedule, images, backend, loss_of, before_step, lambda *_: progress.advance()
        )
        progress.show_loss(outcome.losses[-1])
    outcome.seconds = time.perf_counter() - began
    model.eval()
    with torch.no_grad():
        found = model(start.held_out.images.to(device)).argmax(dim=1) == start.held_out.labels.to(device)
    outcome.accuracy = float(found.float().mean().item())
    return outcome


def measure(
    outcome: Training,
    whole: Sequence[nn.Parameter],
    wrapped: Sequence[nn.Parameter],
    optimizer: Optimizer,
    backend: Backend,
) -> None:
    """Notes the bytes that this rank holds now: parameters, their gradients, optimizer state.

    Args:
        whole: the model's parameters as they were before wrapping. Their memory counts where it can be seen: elsewhere
            they tell their shape, whatever they hold.
        wrapped: what a wrapper made of them.
    """
    inner = optimizer.optim if isinstance(optimizer, shardkit.OSS) else optimizer
    own = [p for group in inner.param_groups for p in group["params"]]
    listed = [*wrapped, *own]
    held = held_bytes if backend.has_storage else counted_bytes
    outcome.parameters = held([*listed, *(whole if backend.has_storage else ())])
    outcome.gradients = held(p.grad for p in listed if p.grad is not None)
    state = [v for values in inner.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    outcome.state = held(state)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors; views of one buffer count once, and the whole buffer counts."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def counted_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors that own no memory of their own until they are computed (XLA)."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def run_rank(rank: int, jobs: list[Job], start: Start) -> list[Training]:
    """Runs jobs one after the other, so that ranks start once; only rank 0 shows progress."""
    outcomes = []
    for job in jobs:
        title = f"{job.strategy} on {job.world_size} x {job.backend}" if rank == 0 else ""
        with Progress(title, job.stop_after * job.steps(start.train_set)) as progress:
            outcomes.append(train(rank, job, start, progress))
    return outcomes


# ------------------------------------------------------------ the command
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; see ``--help``."""
    parser = argparse.ArgumentParser(
        prog="python examples/digits.py",
        description="Trains a small vision transformer on scikit-learn's handwritten digits and compares the "
        "run with one process (losses) and with DDP (bytes a rank).",
    )
    add = parser.add_argument
    add("--backend", default="gloo", help="gloo, cuda, xla, simulated or a third party's")
    ranks = "ranks that train together (default: 2, or as many as torchrun started)"
    add("--ranks", type=int, default=STARTED_RANKS or 2, help=ranks)
    strategy = (
        "what is trained to the end (default: all, one after the other); the others run one epoch, to stand beside it "
        "in the table"
    )
    add("--strategy", choices=[ALL, *STRATEGIES], default=ALL, help=strategy)
    add("--epochs", type=int, default=EPOCHS, help=f"default: {EPOCHS}")
    add("--batch-size", type=int, default=64, help="images a step, over all ranks (default: 64)")
    add("--seed", type=int, default=0, help="draws weights and order (default: 0)")
    args = parser.parse_args(argv)
    if args.ranks < 1 or args.epochs < 1 or args.batch_size % args.ranks:
        parser.error(
            f"--ranks {args.ranks} --epochs {args.epochs} --batch-size {args.batch_size}: the first two must be "
            "at least 1, and the batch size a multiple of the ranks"
        )
    if STARTED_RANKS not in (None, args.ranks):
        parser.error(f"--ranks {args.ranks}, but torchrun started {STARTED_RANKS}; leave --ranks out")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; 0 if all losses agree with one process (and full runs reach the accuracy goal)."""
    args = parse(argv)
    began = time.perf_counter()
    start = prepare(args.seed)

    def job(strategy: str, world_size: int, stop_after: int) -> Job:
        return Job(
            strategy, args.backend, world_size, args.epochs, stop_after, args.batch_size, seed=args.seed
        )

    trained = STRATEGIES if args.strategy == ALL else (args.strategy,)
    jobs = [job(name, args.ranks, args.epochs) for name in trained]
    jobs += [job(name, args.ranks, 1) for name in STRATEGIES if name not in trained]
    single = [job("single", 1, args.epochs)]
    reference = Training()
    if STARTED_RANK is None:
        reference = shardkit.launch(run_rank, 1, backend=args.backend, args=(single, start))[0][0]
    elif STARTED_RANK == 0:
        reference = run_rank(0, single, start)[0]
    ranks = shardkit.launch(run_rank, args.ranks, backend=args.backend, args=(jobs, start))
    if STARTED_RANK:
        return 0  # rank 0 reports

    outcomes = {j.strategy: [rank[i] for rank in ranks] for i, j in enumerate(jobs)}
    off = {name: difference(outcomes[name], reference) for name in STRATEGIES}
    print()
    show({"single": [reference], **{name: outcomes[name] for name in STRATEGIES}}, off)
    print(f"\n{args.ranks} ranks on {args.backend}, held-out accuracy and training time:")
    finished = {name: outcomes[name][0] for name in trained}
    for name, outcome in {"one process": reference, **finished}.items():
        print(f"  {name:11}  {outcome.accuracy:.2%}  {outcome.seconds:5.1f} s")
    worst = max(off.values())
    print(f"All losses equal those of one process within {worst:.1e} (relative, worst step).")
    print(f"{time.perf_counter() - began:.1f} s in all")
    lowest = min(outcome.accuracy for outcome in finished.values())
    return verdict(lowest, worst, full=args.epochs >= EPOCHS)


def difference(ranks: list[Training], reference: Training) -> float:
    """The largest relative difference, over all steps, of the ranks' mean loss from that of one process."""
    means = [sum(step) / len(step) for step in zip(*(r.losses for r in ranks), strict=True)]
    found = [abs(a - b) / abs(b) for a, b in zip(means, reference.losses, strict=False)]
    return max(found, default=float("nan"))


def show(outcomes: dict[str, list[Training]], off: dict[str, float]) -> None:
    """Prints a table: for each strategy, what the rank holds that holds the most."""
    fullest = {name: max(ranks, key=lambda r: r.total) for name, ranks in outcomes.items()}
    words = "strategy,steps,parameters,gradients,optimizer state,total,of DDP,loss off by"
    lines = [tuple(words.split(","))]
    for name, held in fullest.items():
        counts = (len(held.losses), held.parameters, held.gradients, held.state, held.total)
        share = f"{held.total / fullest['ddp'].total:.0%}"
        lines.append((name, *(f"{n:,}" for n in counts), share, f"{off[name]:.0e}" if name in off else "-"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(
        "Bytes on the fullest rank after a backward (state: the optimizer's), and how far the losses are from"
    )
    print("those of one process (largest relative difference of all steps):")
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def verdict(accuracy: float, loss_difference: float, *, full: bool) -> int:
    """Says what is wrong; returns the exit code."""
    problems = []
    if not loss_difference <= LOSS_TOLERANCE:
        problems.append(
            f"losses differ by {loss_difference:.1e} from one process; at most {LOSS_TOLERANCE} was expected"
        )
    if full and accuracy < ACCURACY_GOAL:
        problems.append(f"held-out accuracy is {accuracy:.2%}; at least {ACCURACY_GOAL:.0%} was expected")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
