"""fairscale.nn.misc.param_bucket."""

from shardkit.flattening.bucket import Bucket, GradBucket, ParamBucket

__all__ = ["Bucket", "GradBucket", "ParamBucket"]
