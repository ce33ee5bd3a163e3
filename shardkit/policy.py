"""Options as frozen dataclasses, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .errors import ConfigurationError, check_kinds

Frozen = Literal["reshard", "keep", "host", "packed"]
_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Compression:
    """Sends numbers as blocks of codes of one byte with a scale (fp32) for each block: 0.27 of the bytes of fp32.

    What comes out of a block of int8 is at most half a scale from what went in, which is 1/254 of the block's largest
    magnitude. A block that holds inf or nan comes out without any finite number, so that gradient scalers see it.
    What is no floating-point number, and what is small (less than 1,024 numbers for a rank: biases, norms), travels as
    it is. Where one rank has everything, nothing travels. Not for float64, and not on XLA.

    Attributes:
        dtype: of the codes: int8; float8_e4m3fn and float8_e5m2 keep small numbers beside large ones better, and
            large ones worse: at most 1/17 and 1/9 of a number is lost.
        block: how many numbers share a scale, a multiple of 16; a block has 16 bytes more.

    Source: ZeRO++ (arXiv 2306.10209).
    """

    dtype: torch.dtype = torch.int8
    block: int = 256

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise ConfigurationError(
                f"numbers can't be compressed to {self.dtype}; name one of {', '.join(map(str, _CODES))}"
            )
        if self.block < 16 or self.block % 16:
            raise ConfigurationError(f"block is {self.block}; it must be a multiple of 16, and more than 0")


@dataclass(frozen=True)
class ReducePolicy:
    """Says how gradients travel to their owners.

    Attributes:
        bucket_numel: (ShardedDDP) most elements that are reduced together, by default 2**23; 0 reduces every gradient
            on its own. One bucket is in flight at a time, so this bounds the transient memory of a backward. FSDP
            reduces a unit's gradients together.
        dtype: dtype on the wire; None keeps the gradient's own.
        predivide: (FSDP) gradients are divided by it before they are summed, and by W / predivide afterwards. None
            takes the power of two next to the root of W for half precision, and the plain mean otherwise.
        compression: gradients travel as blocks: one all-to-all, and a sum in fp32 in rank order. With replicas (FSDP)
            what they exchange is compressed, which is what crosses hosts, and gradients within ``group`` are not.
        error_feedback: what compression leaves out of a step's gradients is added to those of the next step. It is
            kept on each rank, in 2 bytes for each gradient that the rank sends: all of a unit's with FSDP, a shard's
            with replicas, all of the model's with ShardedDDP. It is no part of state dicts, and begins at zero again
            when one is loaded, and when parameters are frozen, unfrozen, moved or copied.
        order: "fixed" gives the same bits on any number of ranks; see :mod:`shardkit.reduction.ordered`. None takes
            what the backend's collectives give.
        microbatches: with a fixed order, the K micro-batches of a step over all ranks, one backward each. W has to
            divide it, except inside of :class:`~shardkit.uneven`. None: W, one on each rank.
    """

    bucket_numel: int | None = None
    dtype: torch.dtype | None = None
    predivide: float | None = None
    compression: Compression | None = None
    error_feedback: bool = True
    order: Literal["fixed"] | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        numbers = dict.fromkeys(("bucket_numel", "predivide", "microbatches"), int | float)
        check_kinds(vars(self), dtype=torch.dtype, compression=Compression, **numbers)
        if self.bucket_numel is not None and self.bucket_numel < 0:
            raise ConfigurationError(f"bucket_numel is {self.bucket_numel}; it must be 0 or more")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigurationError(f"gradients can't be reduced in {self.dtype!r}; name a floating dtype")
        if self.predivide is not None and self.predivide <= 0:
            raise ConfigurationError(f"predivide is {self.predivide}; it must be above 0")
        if self.order not in (None, "fixed"):
            raise ConfigurationError(f'order is {self.order!r}; it is "fixed" or None')
        if self.microbatches is not None and (self.order is None or self.microbatches < 1):
            raise ConfigurationError(
                f'microbatches is {self.microbatches}; with order="fixed" it is a number above 0, else None'
            )
        for name in ("compression", "predivide") if self.order else ():
            if (given := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f'{name}={given} with order="fixed": what is rounded then depends on the number of ranks; leave '
                    "one of them out"
                )


@dataclass(frozen=True)
class PrecisionPolicy:
    """Says which dtypes an FSDP unit works in; the shards keep that of the parameters, but for ``masters``.

    Attributes:
        compute: dtype of gathered parameters, of gradients, and of floating-point inputs; None keeps the
            parameters' own and leaves inputs alone.
        buffers: dtype of floating-point buffers; None leaves them alone.
        inputs: dtype to which floating-point inputs are cast; None: ``compute``.
        masters: shards of parameters of 16 bits are fp32, which optimizers, clipping and state dicts see; computed is
            in the parameters' own dtype, or in ``compute``. What is frozen when it is sharded keeps its dtype, also
            where it is unfrozen later. ``OSS(masters=True)`` is the same for :class:`~shardkit.OSS`.
        compression: parameters are gathered as blocks, for forward (in evaluation too) and backward; all ranks compute
            with the same values. Shards, ``summon_full_params`` and state dicts stay exact. With a post-forward mesh
            (``ReshardPolicy(after_forward=n)``) the gathering for backward, within the mesh, is of forward's values
            and not compressed.
    """

    compute: torch.dtype | None = None
    buffers: torch.dtype | None = None
    inputs: torch.dtype | None = None
    compression: Compression | None = None
    masters: bool = False

    def __post_init__(self) -> None:
        dtypes = dict.fromkeys(("compute", "buffers", "inputs"), torch.dtype)
        check_kinds(vars(self), compression=Compression, **dtypes)
        for name in dtypes:
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigurationError(f"{name} is {dtype!r}; name a floating dtype, as torch.bfloat16")


@dataclass(frozen=True)
class ReshardPolicy:
    """Says when an FSDP unit gives its gathered parameters back.

    Attributes:
        after_forward: after forward (backward gathers again); False: after backward only. A number keeps them
            sharded over that many neighbouring ranks between forward and backward.
        root: the same for the outermost unit, whose parameters backward needs first.
        prefetch: how many units ahead are gathered while one computes.
        frozen: "keep": values of what is not trained are gathered once and stay through steps: nothing of them is sent
            again, for their full memory on each rank. "host": the same with a copy in (pinned) host memory, from where
            they come as others are gathered. ``reshard_frozen()`` gives both back; they are gathered anew after they
            were loaded, moved, summoned or unfrozen. A change that goes by ``.data`` of a shard, around its version,
            is not noticed: call ``reshard_frozen()`` after it. "packed": matrices of 1,024 numbers and more that are
            frozen when they are sharded are packed for good; shards, messages and sharded checkpoints have bytes in
            their place, and computation and full state dicts what these stand for. They can't be unfrozen. "reshard":
            they are given back as others are.
        sends_changes: of what ranks have received before, only what has changed since is gathered, as with
            :class:`~shardkit.OSS`: the same bits, for a copy of all values in ``compute`` on each rank, twice that of a
            shard, and a wait of the host in each gathering. For ``compute`` of 16 bits beside shards of fp32.
        packing: "int8": blocks of up to 256 numbers of a row share a scale, see :class:`Compression`. "nf4": 4 bits for
            each and a scale for 64, as QLoRA has it (arXiv 2305.14314).
    """

    after_forward: bool | int = True
    root: bool = False
    prefetch: int = 1
    frozen: Frozen = "reshard"
    packing: Literal["int8", "nf4"] = "int8"
    sends_changes: bool = False

    def __post_init__(self) -> None:
        check_kinds(vars(self), after_forward=int, prefetch=int)
        if not isinstance(self.after_forward, bool) and self.after_forward < 1:
            raise ConfigurationError(
                f"after_forward is {self.after_forward}; name a number of ranks, or a bool"
            )
        if self.prefetch < 0:
            raise ConfigurationError(f"prefetch is {self.prefetch}; it must be 0 or more")
        if self.frozen not in ("reshard", "keep", "host", "packed"):
            raise ConfigurationError(f"frozen is {self.frozen!r}; name 'reshard', 'keep', 'host' or 'packed'")
        if self.packing not in ("int8", "nf4"):
            raise ConfigurationError(f"packing is {self.packing!r}; name 'int8' or 'nf4'")
        if self.sends_changes and not isinstance(self.after_forward, bool):
            raise ConfigurationError(
                f"sends_changes=True with after_forward={self.after_forward}: every rank has a copy of all values "
                "already, which backward takes, too; name True or False"
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """Says what an FSDP unit keeps in host memory.

    Attributes:
        parameters: the shards, so that the optimizer runs on the host. Each gather copies them to the device.
        gradients: the shards' gradients, which are where the shards are; True asks for the host, and is refused where
            the parameters stay on another device.
        masters: the shards, as with ``parameters``, while the device has a copy of them in the dtype that is computed
            in. It is renewed once a step, and gradients come to the host, beside what is computed. A change that goes
            by ``.data`` of a shard, around its version, is noticed in a sample of 256 of its numbers (of averages that
            are swapped in), and in the step of an optimizer.
        states: the optimizer's, which are where the shards are; True and False as for ``gradients``.
        activations: what autograd saves inside of a unit, from the end of its forward to its backward; not of the last
            unit, nor of the root around its units. Activation checkpointing keeps its own.
    """

    parameters: bool = False
    gradients: bool | None = None
    masters: bool = False
    states: bool | None = None
    activations: bool = False

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "masters", "states", "activations"):
            if not isinstance(given := getattr(self, name), bool | None):
                raise ConfigurationError(
                    f"{name}={given!r}: True is for host memory. NVMe and other disks are not offered: they would take "
                    "longer than the step"
                )
        if self.parameters and self.masters:
            raise ConfigurationError(
                "parameters=True leaves no copy of the shards on the device, masters=True does; name one of them"
            )
        for name in ("gradients", "states"):
            if getattr(self, name) is False and self.on_host:
                raise ConfigurationError(
                    f"{name} can't stay on the device while their parameters are on the host"
                )

    @property
    def on_host(self) -> bool:
        """Says whether the shards are."""
        return self.parameters or self.masters
