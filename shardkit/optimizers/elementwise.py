"""Which optimizers update every element by itself.

Where an element's update needs nothing but its own gradient and state, it does not matter how parameters are cut and
joined: shards of flat parameters give the same numbers as the parameters would. An optimizer that takes norms over a
parameter (LAMB, Adafactor), or treats a matrix as one (Muon, Shampoo), gives others.

torch's own optimizers are known. Any other class is tried once, on a few small tensors: stepped over parameters as they
are and over the same numbers cut as shards are. Equal results are the definition.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..backend import as_written

KNOWN = (
    optim.SGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
_COUPLED = (optim.LBFGS, optim.Adafactor, optim.Muon)
_declared: set[type] = set()


class Verdict(enum.Enum):
    ELEMENTWISE = "every element is updated by itself"
    COUPLED = "an element's update depends on others"
    UNKNOWN = "it could not be tried"


def declare_elementwise(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Says that a class updates every element by itself, so that it is neither tried nor refused over shards.

    For classes that can't be tried (they need a device, arguments or calls that are not known here), or that are
    element-wise but for noise. May be used as a decorator. Subclasses are not included.
    """
    _declared.add(optimizer_class)
    return optimizer_class


def is_known_elementwise(optimizer_class: object) -> bool:
    """Says whether it is on the list, or was declared."""
    return optimizer_class in KNOWN or optimizer_class in _declared


def names_of_elementwise() -> str:
    return ", ".join([c.__name__ for c in KNOWN] + sorted(c.__name__ for c in _declared))


Cut = Callable[[torch.Tensor], list[torch.Tensor]]  # of a flat parameter
Maker = Callable[[Sequence[torch.Tensor]], Optimizer]
"""Makes optimizers of one class with the same options over other parameters."""


def judge(optimizer: Optimizer, make: Maker | None = None) -> Verdict:
    """Judges an optimizer, if need be by trying its class; the optimizer itself is not touched.

    Args:
        optimizer: of the class, with the options that count.
        make: makes another one; by default the class with the optimizer's ``defaults``, in which some options of some
            classes are missing.
    """
    kind = type(optimizer)
    if is_known_elementwise(kind):
        return Verdict.ELEMENTWISE
    if issubclass(kind, _COUPLED):
        return Verdict.COUPLED
    makers = [make] if make else [_maker(optimizer, own) for own in (None, *_own_options(optimizer))]
    with as_written():  # some compile their update for each shape, which takes minutes
        verdicts = [_tried(optimizer, each) for each in makers]
    # a norm of everything is the same however parameters are cut, but no rank has everything
    seems_right = verdicts[0] is Verdict.ELEMENTWISE and Verdict.COUPLED not in verdicts
    is_coupled = couples_parameters(optimizer, make) if seems_right else Verdict.COUPLED in verdicts
    return Verdict.COUPLED if is_coupled else verdicts[0]


def couples_parameters(optimizer: Optimizer, make: Maker | None = None) -> bool:
    """Says whether parameters are updated otherwise where each has an optimizer of its own, as far as trying tells.

    A class that takes the norm of all gradients by itself does (LAMB), or that finds one step size for all. Arguments
    are those of :func:`judge`.
    """
    kind = type(optimizer)
    if is_known_elementwise(kind) or kind.__module__.startswith("torch.optim"):
        return False
    make, (parts, _) = make or _maker(optimizer), _SMALL
    whole, start, gradients = _drawn(parts, torch.device("cpu"))

    def only(k: int) -> Cut:
        return lambda flat: whole(flat)[k : k + 1]

    try:
        with torch.random.fork_rng(devices=[]), as_written():
            truth, again = (_stepped(make, whole, start, gradients) for _ in range(2))
            alone = torch.cat([_stepped(make, only(k), start, gradients) for k in range(len(parts))])
    except Exception:  # noqa: BLE001 - as below
        return False
    allowed = _TOLERANCE * (truth - start).abs().max().item()
    is_noise = (again - truth).abs().max().item() > allowed
    return not is_noise and (alone - truth).abs().max().item() > allowed


# ------------------------------------------------------------ trying
# Parameters as (shape, size of their gradients), and where the flat one is cut. The second set is for optimizers
# that work on blocks of some hundred elements, and only of large tensors; the first is there so that one which makes
# square matrices of what it gets has been found out before.
_SMALL = ([((24, 20), 1.0), ((7,), 30.0), ((3, 2, 2, 2), 0.01)], 300)
_LARGE = ([((96, 128), 1.0), ((300,), 30.0)], 6300)
_TOLERANCE = 1e-5  # of the largest change


def _tried(optimizer: Optimizer, make: Maker) -> Verdict:
    devices = [torch.device("cpu"), *(p.device for g in optimizer.param_groups for p in g["params"])]
    for device in dict.fromkeys(devices):
        try:
            return _compared(make, device)
        except Exception:  # noqa: BLE001 - of any class: it wants another call, or other parameters
            continue
    return Verdict.UNKNOWN


def _own_options(optimizer: Optimizer) -> list[dict[str, object]]:
    """Lists what groups say otherwise than the class's options (GaLore's rank), but for numbers such as a rate."""
    plain = {k: v for k, v in optimizer.defaults.items() if not isinstance(v, float | torch.Tensor)}
    left_out = (optimizer.defaults.keys() - plain) | {"params", "param_names", "initial_lr"}
    groups = [plain, *({k: v for k, v in g.items() if k not in left_out} for g in optimizer.param_groups)]
    return list({repr(sorted(own.items())): own for own in groups}.values())[1:]  # tensors can't be compared


def _maker(optimizer: Optimizer, own: Mapping[str, object] | None = None) -> Maker:
    """Makes optimizers of the class with the same options over other parameters, and a group's ``own``."""
    kind: type = type(optimizer)
    accepted = inspect.signature(kind).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}
    options = {k: v for k, v in optimizer.defaults.items() if takes_any or k in names}
    if options.get("lr") == 0:  # a warm-up begins so
        options["lr"] = 0.01
    return lambda params: kind(params if own is None else [{"params": params, **own}], **options)


def _compared(make: Maker, device: torch.device) -> Verdict:
    for parts, cut in (_SMALL, _LARGE):
        whole, start, gradients = _drawn(parts, device)

        def shards(flat: torch.Tensor, cut: int = cut) -> list[torch.Tensor]:
            return [flat[:cut], flat[cut:]]

        truth = _stepped(make, whole, start, gradients)
        change = (truth - start).abs().max().item()
        if not change > 0:
            return Verdict.UNKNOWN
        difference = (_stepped(make, shards, start, gradients) - truth).abs().max().item()
        if difference <= _TOLERANCE * change:
            continue
        noise = (_stepped(make, whole, start, gradients) - truth).abs().max().item()
        return Verdict.UNKNOWN if 10 * noise > difference else Verdict.COUPLED
    return Verdict.ELEMENTWISE if _keeps_elements(make, device) else Verdict.COUPLED


def _keeps_elements(make: Maker, device: torch.device) -> bool:
    """Says whether all state is numbers, and tensors with an element for each of the parameter's.

    What has other state uses it some day, be it after more steps than were tried: Shampoo that starts as SGD. So does
    what keeps a number that depends on gradients, in its state or in the group: a norm, a dot product.
    """
    numbers: list[list[str]] = []  # nan is nan
    for gradient in (1.0, 2.0):
        (param,) = params = [torch.nn.Parameter(torch.ones(24, 20, device=device))]
        optimizer = make(params)
        _switch_to_training(optimizer)
        for _ in range(2):
            param.grad = torch.full_like(param, gradient)
            optimizer.step()
        state = tree_leaves(dict(optimizer.state[param]))
        group = tree_leaves([v for k, v in optimizer.param_groups[0].items() if k != "params"])
        kept = [v for v in (*state, *group) if not isinstance(v, torch.Tensor) or v.numel() == 1]
        numbers.append([str(float(v)) for v in kept if isinstance(v, int | float | torch.Tensor)])
    sizes = {v.numel() for v in state if isinstance(v, torch.Tensor)}
    plain = torch.Tensor | bool | int | float | str
    others = [v for v in state if v is not None and not isinstance(v, plain)]
    return numbers[0] == numbers[1] and sizes <= {1, param.numel()} and not others


def _switch_to_training(optimizer: Optimizer) -> None:
    """Switches to training, without which schedule-free classes refuse to step."""
    switch = getattr(optimizer, "train", None)
    if callable(switch):
        switch()


def _drawn(
    parts: Sequence[tuple[Sequence[int], float]], device: torch.device
) -> tuple[Cut, torch.Tensor, list[torch.Tensor]]:
    """Returns what cuts these parameters out of a flat one, start values [N], and the gradients of each step, [N]."""
    shapes, generator = [torch.Size(shape) for shape, _ in parts], torch.Generator().manual_seed(0)
    numels = [shape.numel() for shape in shapes]

    def whole(flat: torch.Tensor) -> list[torch.Tensor]:
        return [v.view(s) for v, s in zip(flat.split(numels), shapes, strict=True)]

    def draw() -> torch.Tensor:
        rows = [torch.randn(n, generator=generator, device="cpu") for n in numels]
        return torch.cat([row * scale for row, (_, scale) in zip(rows, parts, strict=True)]).to(device)

    start, gradients = draw(), [draw() for _ in range(3)]
    # some look for gradients at a right angle to a parameter (AdamP)
    turned = start[: numels[0]].view(-1, 2).flip(1) * torch.tensor([1.0, -1.0], device=device)
    return whole, start, [*gradients, torch.cat([turned.view(-1), start[numels[0] :]])]


def _stepped(make: Maker, cut: Cut, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the flat parameter [N] after some steps over what ``cut`` makes of it."""
    params = [torch.nn.Parameter(p.clone()) for p in cut(start)]
    optimizer = make(params)
    _switch_to_training(optimizer)
    for gradient in gradients:
        for p, g in zip(params, cut(gradient), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in params])
