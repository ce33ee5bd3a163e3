"""Where forward and backward are in models that are not cut into units: hooks on layers, while somebody listens."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..types import Args, Kwargs, Tree
from .ranges import Heard, What, leave

_models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # and the thread of its rank
_watches: list[LayerWatch] = []


def note_model(module: nn.Module) -> None:
    """The calling rank trains it, and nothing else says where it is."""
    _models[module] = threading.get_ident()
    for watch in _watches:
        watch.watch(module)


class LayerWatch:
    """Makes ranges of the layers of all models of the calling rank, until it is closed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        self._inside: list[tuple[nn.Module, Heard]] = []
        for module in list(_models):
            self.watch(module)
        _watches.append(self)

    def watch(self, module: nn.Module) -> None:
        """This one too."""
        if _models[module] == self._thread:
            for name, layer in layers_of(module):
                self._attach(name, layer)

    def close(self) -> None:
        """Leaves models alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in _watches:
            _watches.remove(self)

    def _attach(self, name: str, layer: nn.Module) -> None:
        forward, backward = What("forward", name), What("backward", name)

        def enter(module: nn.Module, args: Args) -> None:
            heard = Heard(forward)
            heard.__enter__()
            self._inside.append((module, heard))

        def end(module: nn.Module, args: Args, kwargs: Kwargs, outputs: Tree) -> None:
            while self._inside:
                last, heard = self._inside.pop()
                leave(heard)
                if last is module:
                    break
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(reached)

        def reached(_: torch.Tensor) -> None:
            with Heard(backward):
                pass  # a moment

        self._handles.append(layer.register_forward_pre_hook(enter))
        self._handles.append(layer.register_forward_hook(end, with_kwargs=True, always_call=True))


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children that have parameters, in place of lists of modules their elements; below only children."""
    children = [(name, m) for name, m in module.named_children() if next(m.parameters(), None) is not None]
    if len(children) == 1 and next(children[0][1].children(), None) is not None:
        yield from layers_of(children[0][1], f"{prefix}{children[0][0]}.")
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for inner, element in child.named_children():
                if next(element.parameters(), None) is not None:
                    yield f"{prefix}{name}.{inner}", element
        else:
            yield f"{prefix}{name}", child
