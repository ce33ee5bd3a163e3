"""fairscale.nn.misc.param_bucket."""

from shardkit.param_bucket import Bucket, GradBucket, ParamBucket

__all__ = ["Bucket", "GradBucket", "ParamBucket"]
