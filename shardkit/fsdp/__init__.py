"""Sharded parameters (ZeRO stage 3)."""

from .construct import hybrid_groups
from .fully_shard import fully_shard, register_fsdp_forward_method
from .optimizer_check import step_in_backward
from .sharded_api import Change, SentWeights, sharding_of
from .state_dict import gather_plain, shard_plain
from .wrapper import FSDP

__all__ = [
    "FSDP",
    "Change",
    "SentWeights",
    "fully_shard",
    "gather_plain",
    "hybrid_groups",
    "register_fsdp_forward_method",
    "shard_plain",
    "sharding_of",
    "step_in_backward",
]
