"""What torch's own registry of a module's parameters shows while a unit has taken them.

[Note: registries] Parameters that lie in a flat parameter are attributes of their modules, and in no registry: code
that walks ``module._parameters`` (to find shared weights, say) finds what fairscale leaves there. The order in which a
module was written with them is kept beside, for those who list them or put them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .originals import OriginalParameter, Place

ORDER = "_written_parameters"  # an attribute, so that copies and pickles of the module have it


def register(place: Place, param: nn.Parameter) -> None:
    """A module registers a parameter under one of the names it was written with, where that was among the others."""
    module, name = place
    registered, order = module._parameters, _order(module)
    if name not in registered and name in order:
        last = next(reversed(registered), name)
        behind = order.get(last, len(order)) > order[name]
        registered[name] = param
        for later in [*registered] if behind else ():
            if order.get(later, len(order)) > order[name]:
                registered[later] = registered.pop(later)
    registered[name] = param


def unregister(place: Place) -> None:
    """A module forgets a name; :func:`register` knows where it was."""
    module, name = place
    if name not in _order(module):
        module.__dict__[ORDER] = {written: k for k, written in enumerate(written_names(module))}
    module._parameters.pop(name, None)


def hide(place: Place, param: nn.Parameter) -> None:
    """The parameter is an attribute of its module, and not registered."""
    unregister(place)
    place.module.__dict__[place.name] = param


def take_out(originals: Sequence[OriginalParameter]) -> None:
    """These are attributes of their modules, and not registered."""
    for original in originals:
        for place in original.places:
            module, name = place
            if name not in module.__dict__.get(ORDER, ()):
                hide(place, original.param)
            else:
                module._parameters.pop(name, None)
                module.__dict__[name] = original.param


def show(place: Place, param: nn.Parameter) -> None:
    """The parameter is registered in its module again."""
    place.module.__dict__.pop(place.name, None)
    register(place, param)


def written_names(module: nn.Module) -> list[str]:
    """Names of a module's parameters in order, those that a unit has taken included."""
    order = _order(module)
    return [*order, *(name for name in module._parameters if name not in order)]


def hidden(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are attributes of a module, and in no registry."""
    for name in _order(module):
        if name not in module._parameters and isinstance(module.__dict__.get(name), nn.Parameter):
            yield name, module.__dict__[name]


def _order(module: nn.Module) -> dict[str, int]:
    """Places of names among those that a module was written with."""
    order: dict[str, int] = module.__dict__.get(ORDER, {})
    return order
