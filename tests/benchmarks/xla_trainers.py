"""What xla_training.py compares: two models and five ways to train them data-parallel on XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

NATIVE, DDP, FSDP, XLA_FSDP = "native", "DDP", "FSDP", "torch_xla FSDP"
# the second one, as native, leaves buffers as they are
SHARDED_DDP, UNSYNCED = "ShardedDDP", "... buffers left"
NAMES = (NATIVE, DDP, SHARDED_DDP, UNSYNCED, FSDP, XLA_FSDP)


# ------------------------------------------------------------------ models
class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, [B, C, H, W] -> [B, 4 * width, H / stride, W / stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...] = (2, 2, 2, 2), width: int = 16) -> nn.Module:
    """ResNet-50's stages with a quarter of its channels and half of its blocks; 32 x 32 images, 100 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


def mnist() -> nn.Module:
    """The guide's network for images of 28 x 28, 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.BatchNorm2d(10),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.BatchNorm2d(20),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, 10),
    )


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        units: modules of this type are FSDP units, besides the whole.
        gate: what ShardedDDP may lose against native.
        is_real: images of digits, of the files in /tmp/mnist-data or scikit-learn's; else noise.
    """

    build: Callable[[], nn.Module]
    units: type[nn.Module]
    image: tuple[int, ...]
    classes: int
    batch: int
    gate: float
    is_real: bool = False


TASKS = {
    "resnet": Task(resnet, Bottleneck, (3, 32, 32), 100, 16, 0.01),
    "mnist": Task(mnist, nn.Linear, (1, 28, 28), 10, 32, 0.05),
    "mnist, real data": Task(mnist, nn.Linear, (1, 28, 28), 10, 32, 0.05, is_real=True),
}


def batch(task: Task, count: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count * 131 + rank)
    if task.is_real:
        from images import default_folder, has_mnist, load_mnist, real

        folder = default_folder("mnist-data")
        digits = (load_mnist(folder) if has_mnist(folder) else real(28, 1)).train
        chosen = torch.randperm(len(digits), generator=generator)[: task.batch].tolist()
        images, labels = zip(*(digits[index] for index in chosen), strict=True)
        return torch.stack(images), torch.stack(labels)
    images = torch.randn(task.batch, *task.image, generator=generator)
    return images, torch.randint(0, task.classes, (task.batch,), generator=generator)


# ------------------------------------------------------------------ trainers
class Trainer(NamedTuple):
    """What a training loop needs."""

    model: nn.Module
    zero_grad: Callable[[], None]
    update: Callable[[], Any]
    state: Callable[[], list[torch.Tensor]]


def trainer(name: str, task: Task, device: torch.device) -> Trainer:
    torch.manual_seed(0)
    model = task.build().to(device)
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    if name in (SHARDED_DDP, UNSYNCED):
        import shardkit

        oss = shardkit.OSS(model.parameters(), torch.optim.SGD, **options)
        return Trainer(
            shardkit.ShardedDDP(model, oss, broadcast_buffers=name == SHARDED_DDP),
            oss.zero_grad,
            oss.step,
            lambda: [*model.parameters(), *model.buffers(), *(s.own for s in oss.placement.segments)],
        )
    if name == DDP:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif name in (FSDP, XLA_FSDP):
        model = _units(model, _wrapper(name), task.units)
    optimizer = torch.optim.SGD(model.parameters(), **options)
    update: Callable[[], Any] = optimizer.step
    if name == NATIVE:
        import torch_xla.core.xla_model as xm

        update = lambda: xm.optimizer_step(optimizer, pin_layout=False)  # noqa: E731
    return Trainer(model, optimizer.zero_grad, update, lambda: [*model.parameters(), *model.buffers()])


def _wrapper(name: str) -> Callable[[nn.Module], nn.Module]:
    if name == FSDP:
        import shardkit

        return shardkit.FSDP
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    return lambda m: XlaFullyShardedDataParallel(
        m, flatten_parameters=True, pin_layout_in_collective_ops=False, execute_sharding_on_init=False
    )


def _units(model: nn.Module, wrap: Callable[[nn.Module], nn.Module], units: type[nn.Module]) -> nn.Module:
    for name, child in list(model.named_children()):
        if isinstance(child, units):
            setattr(model, name, wrap(child))
    return wrap(model)


# ------------------------------------------------------------------ replicas that run what a TPU runs
@contextlib.contextmanager
def collectives_of_a_tpu(unwatched: bool = False) -> Iterator[Callable[[], None]]:
    """Inside, programs hold the collectives of a TPU, without what replicas on a CPU need to meet.

    They meet all the same, since they share one executable. Yields what has to be called before each sync.

    Args:
        unwatched: for the rest of this process's life, reads and copies of tensors are torch_xla's own as well, without
            the Python that looks out for pending collectives.
    """
    import torch_xla.core.xla_model as xm

    from shardkit.backend import get_backend
    from shardkit.backends.xla import runtime as collectives
    from shardkit.backends.xla import torch_xla_api
    from shardkit.backends.xla.meeting import ReplicaCall
    from shardkit.backends.xla.runtime import Replica, current_world
    from tests.xla.meeting import in_memory

    world = current_world()
    assert world is not None
    state, everybody = world.here(), tuple(range(world.size))
    meet = get_backend("xla").group().all_gather_object
    theirs = vars(collectives._NATIVE)
    meet(None)
    if unwatched:
        while torch_xla_api._keep:
            torch_xla_api._keep.pop()._destroy()
    replaced = {name: getattr(xm, name) for name in theirs}
    meet(None)
    before, state.replica = (
        state.replica,
        Replica(state.rank, world.size, collectives.NativeCollectives(), in_memory(state)),
    )
    for name, function in theirs.items():
        setattr(xm, name, function)
    meet(None)
    try:
        yield lambda: state.issued(ReplicaCall(everybody, "step"))
    finally:
        meet(None)
        for name, function in replaced.items():
            setattr(xm, name, function)
        state.replica = before
