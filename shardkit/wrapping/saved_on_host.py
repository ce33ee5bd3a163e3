"""Keeps what autograd saves in forward in host memory until backward, by unit, both ways ahead of what is computed.

While a unit computes, what the one before it has saved goes to the host; the device has that of two units. The
last unit's stays on the device, for backward begins with it, and so does what the root saves around its units. In
backward, when the first tensor of a unit is asked for, that of the unit before it is asked for, too.

Memory is moved as it is, storage by storage, each once, however many operations have saved a part of it. Views of
original parameters are left alone (they come back with a gather), as is what is small, or a small part of its storage.

[Note: changed in place] Autograd refuses a tensor that was changed after it was saved. Until the copy is through, the
tensor is still there and its version is looked at; afterwards the copy has what was saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..backend import DONE, Backend, Copy
from ..errors import LifecycleError

_SMALL = 2**16  # bytes; to copy less takes as long
_PART = 4  # less than a fourth of a storage is not worth its copy
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_hooks_here = torch._C._autograd._top_saved_tensors_default_hooks


class _SavedStorage:
    """Moves one storage that autograd has saved views of.

    Attributes:
        views: these, as long as the device has them; each with its version.
        uses: how many there were.
    """

    def __init__(self, backend: Backend, tensor: torch.Tensor) -> None:
        self._backend, self._device = backend, tensor.device
        memory = tensor.untyped_storage()
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            memory
        )
        self.views: list[tuple[torch.Tensor, int]] = []
        self.uses = self._given = 0
        self._host = torch.empty(0, device="cpu")
        self._copy: Copy = DONE
        self._changed: list[bool] = []  # of each view, once these are gone

    def leave(self) -> None:
        """Begins to go to the host."""
        saved, memory = sum(tensor.numel() * tensor.element_size() for tensor, _ in self.views), self._bytes
        if memory is None or memory.untyped_storage().nbytes() < memory.numel():
            return  # parameters of another model, released by now
        if saved * _PART >= memory.numel():
            self._host = self._backend.pinned(memory.numel(), torch.uint8)
            self._copy = self._backend.copy_down(self._host, memory)

    def settle(self) -> None:
        """Gives the device's memory back, as soon as it has been copied."""
        if self._host.numel() and self.views:
            self._copy.wait()
            self._changed = [tensor._version != version for tensor, version in self.views]
            self.views, self._bytes = [], None

    def come(self) -> torch.Tensor:
        """Begins to come back; returns where to."""
        self.settle()
        if self._bytes is None:
            self._bytes = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            self._copy = self._backend.copy_up(self._bytes, self._host)
        return self._bytes

    def view(self, saved: _SavedView) -> torch.Tensor:
        """Returns one of the views again."""
        tensor, version = self.views[saved.number] if self.views else (None, 0)
        if self._changed[saved.number] if tensor is None else tensor._version != version:
            raise LifecycleError(
                "a tensor that backward needs was changed in place after forward had computed with it, in a unit with "
                "OffloadPolicy(activations=True); autograd refuses that elsewhere, too. Change a copy"
            )
        if tensor is not None:
            return tensor
        there = self.come()
        self._copy.wait()
        given = torch.empty(0, dtype=saved.dtype, device=self._device)
        with torch.no_grad():
            given.set_(there.untyped_storage(), saved.offset, saved.shape, saved.stride)
        self._given += 1
        if self._given == self.uses:  # a second backward takes it from the host again
            self._given, self._bytes = 0, None
        return given


class _SavedView(NamedTuple):
    """Stands for a view of a storage in autograd's graph."""

    page: SavedInCall
    storage: _SavedStorage
    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedInCall:
    """Collects what autograd saves in one call of a unit, from now on until :meth:`close`."""

    def __init__(self, backend: Backend, before: SavedInCall | None, parameters: set[int]) -> None:
        self._backend, self._before, self._parameters = backend, before, parameters
        self._storages: dict[int, _SavedStorage] = {}
        self._all: list[_SavedStorage] = []
        self._has_come = False
        _push(self._pack, self._unpack)
        self._is_open = True

    def close(self) -> None:
        """Notes that the unit is through."""
        if self._is_open:
            self._is_open = False
            _pop()
            self._storages = {}

    def _pack(self, tensor: torch.Tensor) -> object:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        if tensor.device.type != self._backend.device_type or tensor.is_conj() or tensor.is_neg():
            return tensor  # the memory of a conjugate holds other values
        if tensor.numel() * tensor.element_size() < _SMALL:
            return tensor
        key = tensor.untyped_storage()._cdata
        if key in self._parameters:
            return tensor
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _SavedStorage(self._backend, tensor)
            self._all.append(storage)
        storage.views.append((tensor.detach(), tensor._version))
        storage.uses += 1
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _SavedView(self, storage, storage.uses - 1, *place)

    def _unpack(self, saved: object) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            return saved  # type: ignore[return-value]
        saved.page.come()
        if (before := saved.page._before) is not None:
            before.come()
        return saved.storage.view(saved)

    def come(self) -> None:
        """Begins to come back; a second backward asks for each storage."""
        if not self._has_come:
            self._has_come = True
            for storage in self._all:
                storage.come()

    def leave(self) -> None:
        """Begins to go to the host."""
        for storage in self._all:
            storage.leave()

    def settle(self) -> None:
        """Gives the device's memory back."""
        for storage in self._all:
            storage.settle()


class Activations:
    """Keeps the pages of one forward of a root: of each call of a unit, what autograd has saved in it.

    Args:
        parameters: what its units gather into.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._last: SavedInCall | None = None  # of the unit that was called last, on the device
        self._leaving: SavedInCall | None = None

    def enter(self, backend: Backend) -> SavedInCall | None:
        """Notes that a unit is called; None where somebody else's hooks for saved tensors win."""
        hooks = _hooks_here(True)
        if hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedInCall):
            return None
        if self._last is not None:
            self.settle()
            self._leaving = self._last
            self._leaving.leave()
        return SavedInCall(backend, self._last, self._parameters)

    def leave(self, page: SavedInCall | None) -> None:
        """Notes that the unit is through; None where somebody else's hooks had won."""
        self.settle()
        if page is not None:
            page.close()
            self._last = page

    def settle(self) -> None:
        """Gives the memory back of what was on its way to the host."""
        if self._leaving is not None:
            self._leaving.settle()
            self._leaving = None
