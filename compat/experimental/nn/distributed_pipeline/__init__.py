"""fairscale.experimental.nn.distributed_pipeline. Stages on RPC workers."""

from shardkit.experimental.nn.distributed_pipeline.graph import PipelineModulesGraph
from shardkit.experimental.nn.distributed_pipeline.loss import DistributedLoss
from shardkit.experimental.nn.distributed_pipeline.pipeline import DistributedPipeline

__all__ = [
    "DistributedLoss",
    "DistributedPipeline",
    "PipelineModulesGraph",
]
