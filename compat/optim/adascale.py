"""fairscale.optim.adascale: AdaScale with fairscale's state format and private attributes."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from shardkit.training import adascale as core
from shardkit.training.adascale import SQUARE, VARIANCE
from shardkit.types import StateDict, Tree


def numpy_globals() -> list[Any]:
    """Lists what ``torch.load(weights_only=True)`` has to be allowed for the numpy arrays in an AdaScale state dict.

    ::

        with torch.serialization.safe_globals(numpy_globals()):
            state = torch.load(path)
    """
    import numpy as np  # torch does without

    rebuild = np.ones(1).__reduce__()[0]  # its module's name depends on the version of numpy
    return [rebuild, np.ndarray, np.dtype, type(np.dtype(np.float64))]


class AdaScale(core.AdaScale):
    """fairscale's AdaScale: see :class:`shardkit.AdaScale` for what it does, and its arguments."""

    def state_dict(self) -> StateDict:
        """Returns the wrapped optimizer's, with ``state["adascale"]`` as fairscale's: name -> fp64 numpy array [G].

        With ``weights_only=True`` such a file loads under :func:`numpy_globals`.
        """
        found = super().state_dict()
        found["state"]["adascale"] = {k: v.numpy() for k, v in found["state"]["adascale"].items()}
        return found

    # fairscale's private attributes
    _state = property(lambda self: {k: v.numpy() for k, v in self._averages.items()})
    _local_grad_sqr = property(lambda self: self._meter.sums() if self._meter.has_begun else None)
    _num_grads_to_accum = property(attrgetter("_meter.expected"))
    _hook_handles = property(attrgetter("_meter.hooks.handles"))

    def _grad_sqr_avg(self, pg_idx: int | None = None, name: str = SQUARE) -> float:
        return float(self._averages[name][slice(None) if pg_idx is None else pg_idx].sum())

    def _grad_var_avg(self, pg_idx: int | None = None) -> float:
        return self._grad_sqr_avg(pg_idx, VARIANCE)

    def _gather_flat_grad(self) -> torch.Tensor:
        return self._averaging.flat_gradient(self._meter.like)

    _compute_intra_grad_corr_mean = core.AdaScale.gradient_correlation


class AdaScaleWrapper(AdaScale):
    """An AdaScale that makes its optimizer itself, so that its constructor looks like an optimizer's.

    Put AdaScale around OSS, not into it: there each rank would compare other parameters.

    Args:
        params: of the optimizer.
        world_size, scale, smoothing, num_gradients_to_accumulate, debias_ewma: as :class:`AdaScale`.
        optim_cls: the optimizer's class.
    """

    def __init__(
        self,
        params: ParamsT,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Tree,
    ) -> None:
        # by name: fairscale passes debias_ewma where is_scaled_loss is expected
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,
        )
