"""Parameters or gradients as views of one buffer, which code of fairscale's users fills by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ConfigurationError, LifecycleError


class Bucket:
    """A flat buffer and the parameters that have a part of it.

    Args:
        size: numel of the buffer.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._params: list[torch.Tensor] = []
        self._param_ids: list[int] = []
        self._fill = 0
        self.buffer = torch.zeros(size, dtype=dtype, device=device)

    def to(
        self,
        device: int | torch.device | None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        keep_param_alignment: bool = True,
    ) -> Bucket:
        """Moves or casts the buffer, taken again where it was given up; returns the bucket (fairscale: None).

        Args:
            device, dtype, non_blocking: as of :meth:`torch.Tensor.to`; gradients' parameters have to be there.
            keep_param_alignment: the parameters become views of the new buffer.
        """
        self._build()
        self.buffer = self.buffer.to(device, dtype, non_blocking)
        if keep_param_alignment:
            self._reattach()
        return self

    def _build(self) -> None:
        """Takes the buffer again, where it was given up."""

    def _attach(self, param: torch.Tensor) -> None:
        """Makes the next part of the buffer what the bucket has of a parameter, and gives it the value of that."""
        raise NotImplementedError(type(self).__name__)

    @torch.no_grad()
    def _reattach(self) -> None:
        self._fill = 0
        for p in self._params:
            self._attach(p)

    @torch.no_grad()
    def _add(self, param: torch.Tensor) -> None:
        if id(param) in self._param_ids:
            raise ConfigurationError(f"the parameter of shape {tuple(param.shape)} is in this bucket already")
        self._attach(param)
        self._params.append(param)
        self._param_ids.append(id(param))

    def _take_part(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the next part of the buffer, in the parameter's shape."""
        if (param.dtype, param.device) != (self.buffer.dtype, self.buffer.device):
            raise ConfigurationError(
                f"the parameter is {param.dtype} on {param.device}, its bucket {self.buffer.dtype} on "
                f"{self.buffer.device}; use a bucket for each dtype and device"
            )
        end = self._fill + param.numel()
        if end > self.buffer.numel():
            raise ConfigurationError(
                f"{param.numel()} elements don't fit: {self._fill} of {self.buffer.numel()} are taken; use a larger "
                "bucket"
            )
        part = self.buffer[self._fill : end].view(param.shape)
        self._fill = end
        return part


class ParamBucket(Bucket):
    """Parameters as views of one buffer; arguments as of :class:`Bucket`."""

    def add_param(self, param: torch.Tensor) -> None:
        """Makes the parameter a view of the buffer; it keeps its value.

        Raises:
            ConfigurationError: it is there already, does not fit, or is of another dtype or device.
        """
        self._add(param)

    def _attach(self, param: torch.Tensor) -> None:
        param.data = self._take_part(param).copy_(param)

    @torch.no_grad()
    def _reattach(self) -> None:
        for p in self._params:
            # in the buffer's dtype and device, since a view of it is taken in the parameter's
            p.data = p.data.to(self.buffer)
        super()._reattach()


class GradBucket(Bucket):
    """Gradients as views of one buffer that is sent to one rank.

    Args:
        size, dtype, device: as of :class:`Bucket`.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, destination: int) -> None:
        super().__init__(size, dtype, device)
        self._max_size = size
        self._is_collapsed = False
        self.params_checked_in = 0
        self.destination = destination
        self.sent = True
        self.callback: Callable[[Bucket], None] | None = None

    def reset_checked_in(self) -> None:
        """Begins a new round: no gradient has arrived."""
        self.params_checked_in = 0
        self.sent = False

    @property
    def all_checked_in(self) -> bool:
        """Says whether ``params_checked_in`` says that every gradient has arrived."""
        return len(self._params) == self.params_checked_in

    def can_add_grad_view(self, param: torch.Tensor) -> bool:
        """Says whether the parameter is not yet in and its gradient fits with at least one element to spare."""
        return self._fill + param.numel() < self._max_size and id(param) not in self._param_ids

    def zero(self) -> None:
        """Sets all gradients to zero."""
        self.buffer.zero_()

    def add_grad(self, param: torch.Tensor) -> None:
        """Makes the parameter's gradient a view of the buffer; it keeps its value (zero if there was none).

        Raises:
            ConfigurationError: it is there already, does not fit, or is of another dtype or device.
        """
        self._add(param)

    @torch.no_grad()
    def collapse(self) -> None:
        """Gives the buffer and the gradients up until :meth:`rebuild`."""
        if self._is_collapsed:
            return
        for p in self._params:
            p.grad = None
        self.buffer = self.buffer.new_zeros(0)
        self._fill = 0
        self.params_checked_in = 0
        self._is_collapsed = True

    @torch.no_grad()
    def rebuild(self) -> None:
        """Takes a buffer again for the same gradients, zero where there are none by now.

        Raises:
            LifecycleError: the bucket never had a gradient.
        """
        if not self._params:
            raise LifecycleError("there is nothing to rebuild: add_grad() was never called")
        if self._is_collapsed:
            self.buffer = self._params[0].new_zeros(self._max_size)
            self._reattach()
            self._is_collapsed = False

    def _build(self) -> None:
        if self._is_collapsed:
            self.rebuild()

    @torch.no_grad()
    def shrink(self) -> None:
        """Keeps only the part of the buffer that is taken.

        Raises:
            LifecycleError: the bucket is collapsed.
        """
        self._check_built()
        self.buffer = self.buffer[: self._fill].clone()
        self._max_size = self._fill
        self._reattach()

    def _check_built(self) -> None:
        if not self.buffer.numel():
            raise LifecycleError("the bucket is collapsed; call rebuild() first")

    def _attach(self, param: torch.Tensor) -> None:
        self._check_built()
        part = self._take_part(param)
        if param.grad is None:
            param.grad = part
            return
        param.grad.data = part.copy_(param.grad)
