"""The optimizers that programs use, and their construction for plain torch and for anything with OSS's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    StepLR,
)

from .spec import OptimizerSpec


class TrustRatio(optim.Optimizer):
    """An optimizer in the manner of LAMB, as third parties write them: it needs each parameter whole."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"] = 0
                    state["moment"] = torch.zeros_like(p)
                state["steps"] += 1
                state["moment"].mul_(group["beta"]).add_(p.grad)
                ratio = (p.norm() + 0.1) / (state["moment"].norm() + 0.1)
                p.add_(state["moment"] * ratio, alpha=-group["lr"])
        return loss


class Choice(NamedTuple):
    """An optimizer with its arguments.

    Attributes:
        smooth: its update depends smoothly on the gradient, so that rounding stays rounding. The ``eps`` below are
            large for that reason: some parameters (a bias before a batch norm) have no gradient but noise.
        sparse: "no", "may" or "must" take sparse gradients.
    """

    cls: Callable[..., optim.Optimizer]
    arguments: dict[str, Any]
    smooth: bool = True
    sparse: str = "no"


EPS = 0.01
OPTIMIZERS: dict[str, Choice] = {
    "sgd": Choice(optim.SGD, {}, sparse="may"),
    "momentum": Choice(optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd_fused": Choice(optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": Choice(optim.Adam, {"eps": EPS}),
    "adam_foreach": Choice(optim.Adam, {"eps": EPS, "foreach": True, "amsgrad": True}),
    "adam_fused": Choice(optim.Adam, {"eps": EPS, "fused": True}),
    "adamw_fused": Choice(optim.AdamW, {"eps": EPS, "fused": True, "weight_decay": 0.1}),
    "adamw_loop": Choice(optim.AdamW, {"eps": EPS, "foreach": False, "betas": (0.8, 0.95)}),
    "adagrad": Choice(optim.Adagrad, {"initial_accumulator_value": 0.1}, sparse="may"),
    "rmsprop": Choice(optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": EPS}),
    "adadelta": Choice(optim.Adadelta, {"eps": EPS}),
    "adamax": Choice(optim.Adamax, {"eps": EPS}),
    "nadam": Choice(optim.NAdam, {"eps": EPS}),
    "radam": Choice(optim.RAdam, {"eps": EPS}),
    "rprop": Choice(optim.Rprop, {}, smooth=False),
    "asgd": Choice(optim.ASGD, {"t0": 2.0}),
    "adafactor": Choice(optim.Adafactor, {"eps": (EPS, 0.001)}),
    "sparse_adam": Choice(optim.SparseAdam, {"eps": EPS}, sparse="must"),
    "lbfgs": Choice(optim.LBFGS, {"max_iter": 3, "history_size": 4}, smooth=False),
    "trust_ratio": Choice(TrustRatio, {}),
}

# No count of steps in their state: a vector has one count for all of its parameters. (torch's fused SGD fails where
# a parameter has its first gradient later than others.) The first is drawn most: it moves what has no gradient, too.
STEPLESS = ("momentum", "sgd", "rmsprop", "adagrad", "adadelta")
COUNTING = ("sgd_fused", "adam", "adam_foreach", "adam_fused", "adamw_fused", "adamw_loop", "radam", "adamax")

SCHEDULERS: dict[str, Callable[[optim.Optimizer, float], LRScheduler]] = {
    "step": lambda o, lr: StepLR(o, 1, gamma=0.7),
    "cosine": lambda o, lr: CosineAnnealingLR(o, T_max=5),
    "lambda": lambda o, lr: LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one_cycle": lambda o, lr: OneCycleLR(o, max_lr=2 * lr, total_steps=50),
    "cyclic": lambda o, lr: CyclicLR(o, base_lr=lr, max_lr=2 * lr, step_size_up=2),
}


def split_among_optimizers(names: Sequence[str], count: int) -> list[list[str]]:
    """Consecutive runs of parameter names, one for each optimizer (none is empty if there are enough names)."""
    count = max(1, min(count, len(names)))
    size, rest = divmod(len(names), count)
    runs, start = [], 0
    for i in range(count):
        end = start + size + (i < rest)
        runs.append(list(names[start:end]))
        start = end
    return runs


def group_options(spec: OptimizerSpec, index: int) -> dict[str, Any]:
    return {"lr": spec.lr / (index + 1)}


def arguments_of(spec: OptimizerSpec, params: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """What the optimizer's constructor gets as ``params``, in the spec's form."""
    named = list(params)
    if spec.form == "parameters":
        return [p for _, p in named]
    if spec.form == "named":
        return named
    count = max(1, min(spec.groups, len(named)))
    # which parameters share a group depends on how FSDP flattens them: there, all groups have one rate
    rates = (
        [spec.lr] * count
        if spec.form == "even_groups"
        else [group_options(spec, i)["lr"] for i in range(count)]
    )
    groups: list[dict[str, Any]] = []
    for i in range(count):
        members = named[i::count]
        groups.append(
            {
                "params": members if spec.form == "named_groups" else [p for _, p in members],
                "lr": rates[i],
            }
        )
    if spec.form == "empty_group":
        groups.insert(1, {"params": [], **group_options(spec, 0)})
    return groups
