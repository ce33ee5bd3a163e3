"""Where shardkit's surface parts from fairscale's, each with its reason: the only such list.

An entry covers the findings of :mod:`tests.parity.surface` at the paths that its pattern matches (``*`` stands for
anything) and, if ``what`` is given, of that kind. One that covers nothing is stale and fails the test, except for
kind "behaviour": what is different under the same name and signature; it only has to name something of fairscale's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

from tests.parity.surface import Finding

Kind = Literal["better", "redirected", "missing", "behaviour"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """An entry.

    Attributes:
        kind: "better": does more, or what it did wrong is right; "redirected": importable, and says on use what to
            take instead; "missing": not there (yet); "behaviour": better, but not in its signature.
        where: pattern of paths below fairscale.
        reason: half a sentence.
        what: only findings of this kind.
    """

    kind: Kind
    where: str
    reason: str
    what: str = ""

    def covers(self, finding: Finding) -> bool:
        if self.kind == "behaviour" or (self.kind == "redirected") != (finding.what == "redirected"):
            return False
        return fnmatch.fnmatchcase(finding.where, self.where) and self.what in ("", finding.what)


FSDP = "nn.data_parallel.fully_sharded_data_parallel.FullyShardedDataParallel"
SHARDED = "nn.data_parallel.sharded_ddp.ShardedDataParallel"
CHECKPOINT = "nn.checkpoint.checkpoint_activations"
TESTING = "fair_dev.testing.testing"
WGIT = "experimental.wgit"
BATCH_NORM = "experimental.nn.sync_batchnorm"
SLOWMO = "experimental.nn.data_parallel.gossip.distributed"
SCALER = "experimental.optim.dynamic_loss_scaler"
TRACKER = "experimental.tooling.layer_memory_tracker"

DIFFERENCES = [
    # ---------------------------------------------------------------- data parallelism
    Difference("behaviour", FSDP, "on CPU, CUDA and XLA; frozen, tied and unused parameters within one wrapper"),
    Difference("behaviour", f"{FSDP}.append_shared_param", "needs no call; takes flattened units' weights too"),
    Difference("behaviour", f"{FSDP}.state_dict", "of module.module, flattened over several ranks: refused by name"),
    Difference("behaviour", f"{FSDP}.parameters", "those inside raise where a gradient is read or set"),
    Difference("behaviour", SHARDED, "on CPU, CUDA and XLA; gradients are reduced in buckets while backward runs"),
    Difference("better", f"{FSDP}.load_state_dict", "takes assign= as torch's modules do"),
    Difference("better", f"{SHARDED}.forward", "positional arguments are called args, as in torch"),
    Difference("better", f"{SHARDED}.to", "takes a dtype alone and returns the wrapper"),
    Difference("better", f"{SHARDED}.sync_buffers", "waits by default: what comes back can be read"),
    Difference("better", f"{SHARDED}.zero_grad", "set_to_none by default, as torch since 2.0"),
    Difference("redirected", "nn.data_parallel.fsdp_optim_utils.*", "steps within FSDP's methods, which do it all"),
    Difference("better", "nn.misc.flatten_params_wrapper.*.load_state_dict", "takes assign= as torch's modules do"),
    # ---------------------------------------------------------------- wrap
    Difference("better", "nn.wrap.auto_wrap.auto_wrap", "min_num_params=, as in fairscale's documentation"),
    Difference("better", "nn.wrap.auto_wrap.*_policy", "module_is_root may be left out, as up to fairscale 0.4.5"),
    # ---------------------------------------------------------------- activation checkpointing
    Difference("better", f"{CHECKPOINT}.CheckpointFunction.*", "inner arguments: tensors are found in any structure"),
    Difference("better", f"{CHECKPOINT}.ThreadLocal*", "what the first run computed can be kept for the second"),
    Difference("better", f"{CHECKPOINT}.checkpoint_wrapper", "maintain_forward_counter= of fairscale 0.3 is accepted"),
    # ---------------------------------------------------------------- optimizers
    Difference("better", "optim.grad_scaler.ShardedGradScaler.__init__", "can be given a backend"),
    Difference("better", "optim.oss.OSS.clip_grad_norm", "takes error_if_nonfinite= and foreach= of torch's"),
    Difference("behaviour", "optim.oss.OSS", "broadcast_fp16 leaves parameters alone that are not fp32"),
    Difference("behaviour", "optim.oss.OSS.add_param_group", "options that differ between ranks are refused"),
    Difference("behaviour", "optim.adascale.AdaScaleWrapper", "within OSS refused: it goes around OSS"),
    Difference("behaviour", "optim.adam", "runs everywhere, not only with a CUDA extension; saved state keeps fp32"),
    Difference("behaviour", "optim.layerwise_gradient_scaler.LayerwiseGradientScaler",
               "the step after an overflow has unscaled gradients; containers and unknown names are refused"),
    Difference("behaviour", "optim.adascale.AdaScale", "over OSS, with frozen parameters and half precision"),
    Difference("better", "optim.adascale.AdaScale.*", "takes group= and backend=; zero_grad takes set_to_none="),
    Difference("behaviour", "nn.moe.moe_layer.MOELayer", "any dtype and number of tokens; can be copied"),
    Difference("behaviour", "nn.model_parallel.layers", "on the CPU too; padding_idx and max_norm hit the right rows"),
    # ---------------------------------------------------------------- inner parts
    Difference("behaviour", "internal.containers.apply_to_type", "the data of a PackedSequence is replaced"),
    Difference("behaviour", "internal.params.calc_grad_norm", "fp64 gradients are not rounded to fp32"),
    Difference("behaviour", "internal.reduce_scatter_bucketer.ReduceScatterBucketer", "runs on any device"),
    Difference("behaviour", "nn.misc.param_bucket.Bucket.to", "returns the bucket, as annotated"),
    # ---------------------------------------------------------------- helpers of tests
    Difference("redirected", f"{TESTING}.*", "tests of CUDA's clock, of CUDA 10 and of fairscale's streams"),
    Difference("better", f"{TESTING}.spawn_for_all_world_sizes", "devices are counted when it is called"),
    Difference("behaviour", f"{TESTING}.objects_are_equal", "tolerances hold for nested tensors, too"),
    # ---------------------------------------------------------------- pipelines
    Difference("redirected", "nn.model_parallel.random.*", "the inner part of checkpoint()"),
    Difference("redirected", "nn.pipe.*", "inner parts of fairscale's schedule, streams, messages and skip portals"),
    Difference("missing", "nn.pipe.async_pipe.AsyncPipe.*", "inner methods", what="member"),
    Difference("better", "nn.pipe.checkpoint.ThreadLocal*", "the state of nn.checkpoint, which both ask"),
    # ---------------------------------------------------------------- experimental
    Difference("redirected", "experimental.*.cuda_metering.*", "timing of CUDA phases"),
    Difference("redirected", "experimental.nn.mevo.*", "steps of what is one autograd function now"),
    Difference("redirected", "experimental.nn.ampnet_pipe.*", "an experiment with weights of different ages"),
    Difference("redirected", "experimental.nn.distributed_pipeline.*", "a pipeline over torch's remote modules"),
    Difference("redirected", f"{WGIT}.*", "an unfinished store of model versions"),
    Difference("better", "experimental.nn.offload.*", "inner arguments: any number of tensors", what="signature"),
    Difference("behaviour", f"{BATCH_NORM}.SyncBatchNorm", "any backend, empty batches, exact variances"),
    Difference("behaviour", "experimental.nn.mevo.MemoryEfficientVocabOutput", "any device; hooks see gradients"),
    Difference("behaviour", "experimental.nn.auto_shard.shard_model", "counts parameters of Sequential, finer cuts"),
    Difference("behaviour", f"{SLOWMO}.SlowMoDistributedDataParallel", "starts at rank 0's parameters"),
    Difference("behaviour", f"{SCALER}.DynamicLossScaler", "gradients that were unscaled are not unscaled again"),
    Difference("behaviour", f"{TRACKER}.LayerwiseMemoryTracker", "on the CPU as well; gathers of any FSDP unit"),
]  # fmt: skip
