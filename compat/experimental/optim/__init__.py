"""fairscale.experimental.optim."""

import torch
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_map

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.types import Tree

__all__ = ["DynamicLossScaler"]


# For sharded training take :class:`shardkit.ShardedGradScaler`, which agrees with other ranks on what overflowed.
class DynamicLossScaler:
    """Scales losses; steps are skipped and the scale falls where gradients are not finite.

    fairscale forgets what was unscaled and stepped since the last :meth:`update`, so that gradients were divided
    twice after an explicit :meth:`unscale_`; here they are not, and a second call is an error.

    Args:
        init_scale: the scale at first.
        scale_factor: by which the scale falls, and rises.
        scale_window: updates without an overflow after which it rises.
        tolerance: share of overflows since the last change from which on it falls.
        threshold: it does not fall below this; None: no bound.
        min_loss_scale: a fall to this or below raises FloatingPointError, for the training to end.
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.0,
        threshold: float | None = None,
        min_loss_scale: float = 1e-4,
    ) -> None:
        self.loss_scale = init_scale
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.tolerance = tolerance
        self.threshold = threshold
        self.min_loss_scale = min_loss_scale
        self._iter = 0
        self._last_overflow_iter = -1
        self._last_rescale_iter = -1
        self._overflows_since_rescale = 0
        self._states: dict[int, OptState] = {}

    def scale(self, outputs: Tree) -> Tree:
        """Returns a tensor times the scale; also tensors in lists and tuples."""
        return tree_map(lambda output: self.loss_scale * output, outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides gradients by the scale, in place.

        Raises:
            LifecycleError: a second time, or after :meth:`step`, without an :meth:`update` between.
        """
        state = self._states.get(id(optimizer), OptState.READY)
        if state is not OptState.READY:
            done = "unscale_()" if state is OptState.UNSCALED else "step()"
            raise LifecycleError(
                f"unscale_() after {done} of the same optimizer; call update() at the end of a step"
            )
        with torch.no_grad():
            params = [p for g in optimizer.param_groups for p in g["params"]]
            for gradient in [p.grad for p in params if p.grad is not None]:
                gradient.mul_(1.0 / self.loss_scale)
        self._states[id(optimizer)] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Tree, **kwargs: Tree) -> Tree:
        """Unscales gradients, unless that was done, and steps the optimizer; skips it if they are not finite.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns; None if it was skipped.

        Raises:
            LifecycleError: a second time without an :meth:`update` between.
            FloatingPointError: the scale can't fall any further.
        """
        if "closure" in kwargs:
            raise ConfigurationError(
                "DynamicLossScaler takes no closure; call the optimizer's step() with it yourself"
            )
        if self._states.get(id(optimizer)) is OptState.STEPPED:
            raise LifecycleError("step() a second time; call update() after the first")
        for group in optimizer.param_groups:
            # The norm in fp32, as fairscale: finite gradients whose squares add up to more count as an overflow too.
            gradients = [p.grad.detach() for p in group["params"] if p.grad is not None]
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
            if not torch.nn.utils.get_total_norm(norms).isfinite():
                self._fall()
                return None
        if self._states.get(id(optimizer)) is not OptState.UNSCALED:
            self.unscale_(optimizer)
        self._states[id(optimizer)] = OptState.STEPPED
        return optimizer.step(*args, **kwargs)

    def _fall(self) -> None:
        """Notes an overflow: lowers the scale where there were enough of them."""
        before = self.loss_scale
        since = self._iter - self._last_rescale_iter
        self._last_overflow_iter = self._iter
        self._overflows_since_rescale += 1
        if self._overflows_since_rescale >= self.tolerance * since:
            self.loss_scale = max(self.loss_scale / self.scale_factor, self.threshold or 0.0)
            self._last_rescale_iter = self._iter
            self._overflows_since_rescale = 0
        if self.loss_scale <= self.min_loss_scale:
            self.loss_scale = before
            raise FloatingPointError(
                f"gradients overflow at a loss scale of {before}, and the next one is not above min_loss_scale="
                f"{self.min_loss_scale}: the loss is probably exploding; lower the learning rate, clip gradients or "
                "use larger batches"
            )
        self._iter += 1

    def update(self) -> None:
        """Ends a step: raises the scale if the last overflow is long enough ago."""
        if (self._iter - self._last_overflow_iter) % self.scale_window == 0:
            self.loss_scale *= self.scale_factor
            self._last_rescale_iter = self._iter
        self._iter += 1
        self._states.clear()

    def state_dict(self) -> dict[str, float]:
        """Returns the scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Takes the scale over, if there is one."""
        self.loss_scale = state_dict.get("loss_scale", self.loss_scale)
