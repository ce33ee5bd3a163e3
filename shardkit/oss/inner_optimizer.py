"""The optimizer that an OSS runs over its rank's part: what may be one, and how it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..optimizers.elementwise import couples_parameters
from ..types import Kwargs, ParamGroup


def check_optimizer_class(optim: object, refused: type[Optimizer]) -> None:
    """Raises ConfigurationError unless it makes optimizers, and others than the ``refused``."""
    if isinstance(optim, Optimizer):
        raise ConfigurationError(
            f"optim is an optimizer object ({type(optim).__name__}); pass its class and its arguments: "
            f"OSS(params, optim={type(optim).__name__}, lr=...)"
        )
    if isinstance(optim, type) and not issubclass(optim, Optimizer):
        raise ConfigurationError(
            f"optim={optim.__name__} is no torch.optim.Optimizer; pass an optimizer class such as torch.optim.AdamW"
        )
    if not callable(optim):
        raise ConfigurationError(f"optim={optim!r} is no optimizer class; pass one such as torch.optim.AdamW")
    if isinstance(optim, type) and issubclass(optim, refused):
        raise ConfigurationError("optim is OSS itself; pass the optimizer class that OSS should shard")


def make_inner(
    optim: Callable[..., Optimizer], groups: list[ParamGroup], defaults: Kwargs, *, splits: bool
) -> Optimizer:
    """``optim(groups, **defaults)``, where ``defaults`` may be those of another optimizer of the class.

    Trainers pass ``**optimizer.defaults``, and some classes have entries that their constructors don't take (AdamW's
    ``decoupled_weight_decay``): these are left out where the class sets the same value by itself.

    Args:
        optim: the class, or a callable that makes one.
        groups: this rank's part.
        defaults: the other arguments.
        splits: other ranks have other parameters.

    Raises:
        ConfigurationError: what it makes is no optimizer, or updates parameters together though ranks split them.
    """
    accepted = inspect.signature(optim).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted)
    names = {p.name for p in accepted}
    fixed = {} if takes_any else {k: v for k, v in defaults.items() if k not in names}
    made = optim(groups, **{k: v for k, v in defaults.items() if k not in fixed})
    found = made.defaults if isinstance(made, Optimizer) else {}
    unknown = [k for k, v in fixed.items() if k not in found or found[k] != v]
    if unknown:
        raise TypeError(
            f"{getattr(optim, '__name__', optim)} takes no argument {', '.join(map(repr, unknown))}"
        )
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"optim={optim!r} returned {type(made).__name__}; it has to return a torch.optim.Optimizer"
        )
    if splits and couples_parameters(
        made, lambda params: optim(params, **{k: v for k, v in defaults.items() if k not in fixed})
    ):
        raise ConfigurationError(
            f"{type(made).__name__} updates parameters together, with these options, and OSS gives each rank some of "
            "them: its steps would be others than without sharding. Turn off what looks at all of them (LAMB's "
            "max_grad_norm=None, then clip with OSS.clip_grad_norm), or use it without OSS"
        )
    return made
