"""A factor for the gradients of each layer, as half precision may need."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardkit.errors import ConfigurationError
from shardkit.types import AnyCallable, Tree


class LayerInfo:
    """A layer and its factor.

    Args:
        scale_layer: whether the factor changes over time.
    """

    def __init__(self, name: str, layer: nn.Module, scale: float = 1.0, scale_layer: bool = False) -> None:
        self.layer_name = name
        self.layer = layer
        self.scaling_factor = scale
        self.found_inf_or_nan = False
        self.growth_tracker = 0
        self.scale_layer = scale_layer


class GradientHelper:
    """A backward hook that takes gradients from one layer's factor to that of the layer before it.

    Args:
        name: path of the layer.
        inputs_multiplier: factor of the layer before.
        outputs_multiplier: one over the layer's own.
    """

    def __init__(self, name: str, inputs_multiplier: float, outputs_multiplier: float) -> None:
        self.layer_name = name
        self.inputs_multiplier = inputs_multiplier
        self.outputs_multiplier = outputs_multiplier

    def scale_gradients(self, m: nn.Module, inputs: Tree, outputs: Tree) -> tuple[torch.Tensor | None, ...]:
        """Serves as the hook: gradients of the layer's inputs, multiplied at once (a step between could underflow)."""
        factor = self.inputs_multiplier * self.outputs_multiplier
        return tuple(None if x is None else x * factor for x in inputs)


class LayerwiseGradientScaler:
    """Gives chosen layers a factor of their own during backward; an overflow in one layer lowers only that one.

    Layers pass gradients on in the order of ``model.named_modules()``, so this has to be the order in which they run.
    The last layer gets its gradients from the loss: if it is scaled, multiply the loss by its factor. ::

        scaler = LayerwiseGradientScaler(model, {"conv1": 2**10, "fc1": 2**8})
        for inputs, targets in data:
            optimizer.zero_grad()
            scaler.scale()
            criterion(model(inputs), targets).backward()
            scaler.unscale()
            scaler.step(optimizer)

    fairscale leaves gradients scaled in the step after an overflow and takes that step; here every step is unscaled.

    Args:
        model: the module.
        layer_scale_dict: path of a layer -> its factor; empty: nothing is scaled.
        growth_factor, growth_interval: a factor is multiplied by the one after so many steps without overflow.
        backoff_factor: and by this after an overflow in its layer.
        min_scale, max_scale: bounds of factors.

    Raises:
        ConfigurationError: a factor that does not grow or shrink, or a name that is not that of a layer without
            children (gradients within a container can't be scaled by its input and output).
    """

    def __init__(
        self,
        model: nn.Module,
        layer_scale_dict: dict[str, float],
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10000,
        min_scale: float = torch.finfo(torch.float32).tiny,
        max_scale: float = torch.finfo(torch.float32).max,
    ) -> None:
        self._model = model
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._handles: list[RemovableHandle] = []
        self.layer_info: list[LayerInfo] = []
        if not layer_scale_dict:
            return
        if growth_factor <= 1.0 or backoff_factor >= 1.0:
            raise ConfigurationError(
                f"growth_factor has to be above 1 and backoff_factor below; got {growth_factor} and {backoff_factor}"
            )
        layers = {name: layer for name, layer in model.named_modules() if name}
        for name in layer_scale_dict:
            if name not in layers or any(True for _ in layers[name].children()):
                leaves = [n for n, layer in layers.items() if not any(True for _ in layer.children())]
                raise ConfigurationError(
                    f"layer_scale_dict names {name!r}, which is no layer without children; there are {leaves}"
                )
        self.layer_info = [
            LayerInfo(name, layer, layer_scale_dict.get(name, 1.0), name in layer_scale_dict)
            for name, layer in layers.items()
        ]

    def scale(self) -> None:
        """Makes the next backward scale; to be called before forward."""
        before = 1.0
        for info in self.layer_info:
            helper = GradientHelper(info.layer_name, before, 1.0 / info.scaling_factor)
            self._handles.append(info.layer.register_full_backward_hook(helper.scale_gradients))
            before = info.scaling_factor

    @torch.no_grad()
    def unscale(self) -> None:
        """Divides the gradients of each scaled layer by its factor; to be called after backward."""
        for info in self.layer_info:
            for param in info.layer.parameters() if info.scale_layer else ():
                if param.grad is not None:
                    param.grad.mul_(1.0 / info.scaling_factor)
        while self._handles:
            self._handles.pop().remove()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps unless a gradient is inf or nan, and adapts the factors."""
        found = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        # one transfer to the host for all of them
        flags = [torch.isfinite(g).all().to(found[0][1].device) for _, g in found]
        finite = torch.stack(flags).tolist() if flags else []
        overflowed = {p for (p, _), good in zip(found, finite, strict=True) if not good}
        for info in self.layer_info:
            info.found_inf_or_nan = any(p in overflowed for p in info.layer.parameters())
        if not any(info.found_inf_or_nan for info in self.layer_info):
            optimizer.step()
        for info in self.layer_info:
            factor = self._backoff_factor
            if not info.found_inf_or_nan:
                info.growth_tracker += 1
                factor = self._growth_factor if info.growth_tracker == self._growth_interval else 1.0
            if info.scale_layer and factor != 1.0:
                info.scaling_factor = max(self._min_scale, min(factor * info.scaling_factor, self._max_scale))
                info.growth_tracker = 0

    def get_layer_info(self) -> list[LayerInfo]:
        """Returns all layers, in order."""
        return self.layer_info

    def get_backward_hooks(self) -> list[tuple[str, AnyCallable]]:
        """Returns the path of each module below the model, and its backward hooks."""
        return [(name, layer._get_backward_hooks()) for name, layer in self._model.named_modules() if name]
