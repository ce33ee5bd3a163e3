"""``shardkit.save_training``: a checkpoint of a training; ``shardkit.save``: a file of one object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..progress import noting_errors
from ..running.folder import note_checkpoints
from ..types import ProcessGroup, Tree
from .collecting import Parts, backend_and_ranks, collect
from .files.saving import save as save_file
from .handles import Handle
from .rank_states import Stateful
from .saves import Save

_PathLike = str | os.PathLike[str]


@noting_errors
def save_training(
    dir: _PathLike,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: Stateful | None = None,
    loader: Stateful | None = None,
    ema: nn.Module | None = None,
    extra: Mapping[str, object] | None = None,
    async_: bool = False,
    keep: int | None = None,
    group: ProcessGroup = None,
) -> Handle:
    """Saves a training in a folder of checkpoints (collective).

    ::

        shardkit.save_training("checkpoints", model=model, optimizer=optimizer, step=17)

    All ranks write what they have, in torch.distributed.checkpoint's format and by the model's own names, to
    ``dir/step-00000017``. That folder is complete or is not there. :func:`shardkit.restore_training` reads it at any
    number of ranks, sharded in whatever way. See ``docs/CHECKPOINTS.md``.

    Args:
        dir: folder of checkpoints, which all ranks see; it is made if need be.
        step: that the training has done; a checkpoint of it is replaced.
        model: plain, wrapped by ShardedDDP or DistributedDataParallel, or sharded by FSDP, fully_shard or FSDP2.
        optimizer: over the model's parameters: plain, an OSS, WholeParameters, AdaScale around one; or a list (Muon
            beside AdamW; with ``nn.ModuleDict`` as model, those of several models).
        scheduler, scaler, loader: have state_dict() and load_state_dict(). Schedulers may be a list.
        ema: a second module like ``model``, as torch's AveragedModel makes one.
        extra: whatever else by name, as data; the first rank's is kept.
        async_: returns as soon as values are copied to the host; they are written in the background. The next save
            waits for it, and so does the end of the program.
        keep: how many checkpoints to keep; older ones are deleted once the new one is complete. None: all are kept.
        group: ranks that take part; default all.

    Returns:
        A handle with ``path``, ``done`` and ``wait()``; without ``async_`` all is done.

    Raises:
        FileNotWrittenError: the disk is full, or the folder can't be written to (also an OSError). This and all errors
            below are raised on all ranks, and earlier checkpoints are whole.
        ConfigurationError: something can't be kept in a checkpoint, and the message says what; ranks don't see the same
            folder.
        CheckpointError: something else went wrong on a rank.
        RankMismatchError: ranks were called with different steps, or have different models.
    """
    backend, ranks = backend_and_ranks(model, group)
    parts = Parts(model, optimizer, scheduler, scaler, loader, ema)
    note_checkpoints(dir)
    saving = Save(os.path.realpath(dir), ranks, step, keep, async_)
    with torch.no_grad():
        saving.begin(lambda: collect(parts, saving.step, extra, backend, ranks))
    return saving.in_background() if async_ else saving.write()


@overload
def save(obj: object, path: _PathLike) -> None: ...
@overload
def save(dir: _PathLike, /, *, step: int, **training: Tree) -> Handle: ...
def save(*args: Tree, **kwargs: Tree) -> Handle | None:
    """Saves one object in a file: ``torch.save``, but a kill or a full disk leaves the file that was there.

    ::

        shardkit.save(obj, "file.pt")

    All bytes have checksums, which :func:`shardkit.load` compares. The file is written beside the old one and renamed;
    the disk holds both then. ``save(dir, step=..., model=...)`` is :func:`shardkit.save_training`.

    Args:
        obj: what ``torch.save`` takes; :func:`shardkit.load` reads data alone: tensors, numbers, text, lists.
        path: a regular file, or none yet, in a folder that exists.

    Raises:
        FileNotWrittenError: the disk is full, or the folder can't be written to (also an OSError).
        ConfigurationError: the path is a folder, a pipe or a device.
    """
    if len(args) + ("obj" in kwargs) + ("path" in kwargs) > 1:
        return save_file(*args, **kwargs)  # type: ignore[func-returns-value]
    if len(args) != 1 or not isinstance(args[0], str | os.PathLike):
        raise ConfigurationError(
            "shardkit.save takes an object and a path, save(obj, 'file.pt'); a training is saved by "
            "save_training('checkpoints', model=model, optimizer=optimizer, step=17)"
        )
    return save_training(args[0], **{"step": None, **kwargs})
