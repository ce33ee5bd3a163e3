"""Options that would have no effect are refused, not accepted silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit import FSDP, OSS, Compression, OffloadPolicy, PrecisionPolicy, ReducePolicy, ShardedDDP
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError
from shardkit.nn import FullyShardedDataParallel, ShardedDataParallel
from tests.border.strategies import needs_xla, run


def _options(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigurationError, match="bucket_numel=100 is for ShardedDDP"):
        FSDP(model, reduce=ReducePolicy(bucket_numel=100))
    oss = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"predivide=2.0 is for FSDP"):
        ShardedDDP(model, oss, reduce=ReducePolicy(predivide=2.0))
    # what fairscale takes is taken, and on the host gradients are where they are asked to be
    ShardedDataParallel(model, oss, reduce_buffer_size=100)
    FullyShardedDataParallel(nn.Linear(3, 2), bucket_cap_mb=1, move_grads_to_cpu=True)
    FSDP(nn.Linear(3, 2), offload=OffloadPolicy(gradients=True))


def test_options_that_are_the_other_wrappers() -> None:
    run((2, "gloo"), _options)


def _on_a_device(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2).to(get_backend("xla").device())
    with pytest.raises(ConfigurationError, match="the shards are on xla"):
        FSDP(model, offload=OffloadPolicy(gradients=True))
    for options in (
        {"precision": PrecisionPolicy(compression=Compression())},
        {"reduce": ReducePolicy(compression=Compression())},
    ):
        with pytest.raises(ConfigurationError, match="on xla all ranks run one compiled program"):
            FSDP(model, **options)
    with pytest.raises(ConfigurationError, match="on xla all ranks run one compiled program"):
        ShardedDDP(
            model,
            OSS(model.parameters(), torch.optim.SGD, lr=0.1),
            reduce=ReducePolicy(compression=Compression()),
        )


@pytest.mark.xla
@needs_xla
def test_gradients_cannot_be_elsewhere_than_their_parameters() -> None:
    run((2, "xla"), _on_a_device)
