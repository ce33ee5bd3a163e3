"""Full weights of a sharded model as files that ``from_pretrained`` reads."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import nn

from ..errors import noting_errors
from ..fsdp.sharded_api import Names, raising_together, sharding_of
from ..torch_seams.tensors import named_parts
from .files.writing import folder_written_whole
from .tools.hugging_face import SafetensorsFiles, check_shard_size
from .tools.stored import blocks_of


@noting_errors
def save_weights(
    model: nn.Module, path: str | os.PathLike[str], names: Names = None, dtype: torch.dtype | None = None,
    *, max_shard_size: int = 5 * 10**9,
) -> None:  # fmt: skip
    """Writes full weights of a sharded model to a folder of safetensors files, on the first rank (collective).

    No more than a unit is in memory at a time. The folder is whole or not there.

    Args:
        names, dtype: as :meth:`ShardedAPI.export` takes them.
        max_shard_size: bytes of a file; more only where one tensor has more. Several have an index beside them.

    Raises:
        ConfigurationError: there is something at this path; ``max_shard_size`` is no number of bytes; or what
            ``export`` can't send.
        FileNotWrittenError: the disk is full, or the folder can't be written to.
        RankFailedError: on other ranks, for what the first one raises.
    """
    files: list[SafetensorsFiles] = []

    def write(name: str, weights: torch.Tensor) -> None:
        if not files:
            folder = stack.enter_context(folder_written_whole(os.fspath(path), overwrite=False))
            files.append(SafetensorsFiles(folder, max_shard_size))
        for part, values in named_parts(name, weights).items():
            files[0].add(part, values.dtype, values.shape, blocks_of(values.cpu(), values.dtype))

    with raising_together(sharding_of(model), "save_weights()"):
        check_shard_size(max_shard_size)
    with contextlib.ExitStack() as stack:
        sharding_of(model).export(names, dtype, on=0, to=write)
        with raising_together(sharding_of(model), "save_weights()"):
            for each in files:
                each.finish()
            stack.close()
