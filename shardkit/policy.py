"""Options as frozen dataclasses, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ConfigurationError


@dataclass(frozen=True)
class ReducePolicy:
    """How gradients travel to their owners.

    Attributes:
        bucket_numel: (ShardedDDP) most elements that are reduced together, by default 2**23; 0 reduces every gradient
            on its own. One bucket is in flight at a time, so this bounds the transient memory of a backward. FSDP
            reduces a unit's gradients together.
        dtype: dtype on the wire; None keeps the gradient's own.
        predivide: (FSDP) gradients are divided by it before they are summed, and by W / predivide afterwards. None
            takes the power of two next to the root of W for half precision, and the plain mean otherwise.
    """

    bucket_numel: int | None = None
    dtype: torch.dtype | None = None
    predivide: float | None = None

    def __post_init__(self) -> None:
        if self.bucket_numel is not None and self.bucket_numel < 0:
            raise ConfigurationError(f"bucket_numel is {self.bucket_numel}; it must be 0 or more")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigurationError(f"gradients can't be reduced in {self.dtype}; name a floating dtype")
        if self.predivide is not None and self.predivide <= 0:
            raise ConfigurationError(f"predivide is {self.predivide}; it must be above 0")


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which dtypes an FSDP unit works in; the shards keep that of the parameters.

    Attributes:
        compute: dtype of gathered parameters, of gradients, and of floating-point inputs; None keeps the
            parameters' own and leaves inputs alone.
        buffers: dtype of floating-point buffers; None leaves them alone.
        inputs: dtype to which floating-point inputs are cast; None: ``compute``.
    """

    compute: torch.dtype | None = None
    buffers: torch.dtype | None = None
    inputs: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "buffers", "inputs"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigurationError(f"{name} is {dtype}; name a floating dtype")


@dataclass(frozen=True)
class ReshardPolicy:
    """When an FSDP unit gives its gathered parameters back.

    Attributes:
        after_forward: after forward (backward gathers again); False: after backward only. A number keeps them
            sharded over that many neighbouring ranks between forward and backward.
        root: the same for the outermost unit, whose parameters backward needs first.
        prefetch: how many units ahead are gathered while one computes.
    """

    after_forward: bool | int = True
    root: bool = False
    prefetch: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.after_forward, bool) and self.after_forward < 1:
            raise ConfigurationError(
                f"after_forward is {self.after_forward}; name a number of ranks, or a bool"
            )
        if self.prefetch < 0:
            raise ConfigurationError(f"prefetch is {self.prefetch}; it must be 0 or more")


@dataclass(frozen=True)
class OffloadPolicy:
    """What an FSDP unit keeps in host memory.

    Attributes:
        parameters: the shards, so that the optimizer runs on the host.
        gradients: the shards' gradients, which are where the shards are; True asks for the host, and is refused where
            the parameters stay on another device.
    """

    parameters: bool = False
    gradients: bool | None = None

    def __post_init__(self) -> None:
        if self.parameters and self.gradients is False:
            raise ConfigurationError(
                "gradients can't stay on the device while their parameters are on the host"
            )
