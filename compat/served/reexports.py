"""Names that modules of fairscale, and of earlier versions of shardkit, have from elsewhere: one table.

:mod:`shardkit.compat.redirected` serves it.
"""

from __future__ import annotations

# fmt: off
# Modules, all below shardkit, and what those were called up to 0.2.0, or are in fairscale, that may be imported by
# either name.
_BEFORE = {
    "checkpoint.tools": "checkpoint_tools",
    "experimental.nn.data_parallel.gossip":
    "experimental.nn.data_parallel.gossip.distributed experimental.nn.data_parallel.gossip.gossiper "
    "experimental.nn.data_parallel.gossip.graph_manager experimental.nn.data_parallel.gossip.mixing_manager "
    "experimental.nn.data_parallel.gossip.utils experimental.nn.data_parallel.gossip.utils.helpers extra.gossip",
    "experimental.nn":
    "experimental.nn.auto_shard experimental.nn.mevo experimental.nn.offload experimental.nn.sync_batchnorm "
    "extra.auto_shard extra.offload extra.vocab_output",
    "experimental.optim": "experimental.optim.dynamic_loss_scaler extra.dynamic_loss_scaler",
    "experimental.tooling.layer_memory_tracker": "experimental.tooling.memory_tracker extra.memory_tracker",
    "fair_dev.testing.testing":
    "fair_dev.testing.golden_testing_data fair_dev.testing.models fair_dev.testing.spawning "
    "utils.testing",
    "flattening.wrapper": "flattening.flat_parameter",
    "internal": "utils",
    "internal.params": "internal.containers internal.parallel internal.reduce_scatter_bucketer optim.utils",
    "model_parallel.groups": "model_parallel.random",
    "model_parallel.layers": "model_parallel.regions",
    "model_parallel.moe": "moe",
    "model_parallel.vocab_loss": "extra.vocab_loss",
    "nn.checkpoint.checkpoint_activations": "nn.misc.checkpoint_activations",
    "nn.data_parallel":
    "nn.data_parallel.fsdp_facts nn.data_parallel.fully_sharded_data_parallel nn.data_parallel.sharded_ddp",
    "nn.wrap.auto_wrap": "nn.auto_wrap",
    "optim":
    "extra.adam extra.layerwise_gradient_scaler optim.adam optim.adascale "
    "optim.layerwise_gradient_scaler optim.oss",
    "pipeline.async_pipe": "pipeline.remote_pipe",
    "pipeline.microbatch": "pipeline.partition",
    "tools.estimate": "estimate",
    "tools.rehearsal": "rehearsal",
    "tools.verify": "testing",
    "torch_fsdp.fsdp2": "torch_fsdp2",
    "training.adascale": "adascale",
    "training.data": "data",
    "training.evaluation": "evaluation",
    "training.grad_scaler": "grad_scaler",
    "training.out_of_memory": "out_of_memory",
    "training.whole_parameters": "whole_parameters",
    "wrapping.activations": "activations",
}
MOVED = {name: now for now, names in _BEFORE.items() for name in names.split()}

# Path of a module -> where the names are that it has from elsewhere, below shardkit, and the names, as in an import.
REEXPORTED = {
    "experimental.nn.ampnet_pipe.ampnet":
    "model_parallel.groups: get_pipeline_parallel_ranks; nn.pipe.async_schedule: AsyncMessageBody, "
    "AsyncMessageType, AsyncRecvOperator, Location, ModuleWrapper; nn.pipe.messages: Transport; "
    "nn.pipe.parts: Checkpointing; nn.pipe.types: PipeMessage; nn.pipe.worker: Task; pipeline.microbatch: "
    "Batch",
    "experimental.nn.ampnet_pipe.pipe":
    "experimental.nn.ampnet_pipe.ampnet: AsyncAMPnetEventLoop; pipeline.async_pipe: AsyncPipe",
    "experimental.nn.data_parallel.gossip":
    "experimental.nn.data_parallel.gossip: NPeerDynamicDirectedExponentialGraph as NPDDEGraph; "
    "experimental.nn.data_parallel.gossip.cuda_metering: CudaEventRecorder, DummyCudaEventRecorder, EventRecorder, "
    "MAX_LEN_DEQUEUE, create_event_recorder, deque_with_max_len_fixed",
    "experimental.nn.distributed_pipeline":
    "experimental.nn.distributed_pipeline.graph: PipelineModulesGraph; "
    "experimental.nn.distributed_pipeline.loss: DistributedLoss; "
    "experimental.nn.distributed_pipeline.pipeline: DistributedPipeline",
    "experimental.nn.distributed_pipeline.graph": "experimental.nn.distributed_pipeline.data: DataConsumer",
    "experimental.nn.distributed_pipeline.partition_handler":
    "experimental.nn.distributed_pipeline.data: DataConsumer; nn.pipe: microbatch; nn.pipe.parts: "
    "Checkpointing, as_cuda, current_stream, fork, is_cuda, join, use_device, use_stream; nn.pipe.worker: "
    "Task, create_workers; pipeline.microbatch: Batch",
    "experimental.nn.distributed_pipeline.pipeline":
    "experimental.nn.distributed_pipeline.data: DataConsumer; experimental.nn.distributed_pipeline.graph: "
    "Node, PipelineModulesGraph; experimental.nn.distributed_pipeline.partition_handler: "
    "DistributedPipelineRecord, PartitionHandler; internal: torch_version; nn.pipe: microbatch",
    "experimental.nn.distributed_pipeline.trace":
    "experimental.nn.distributed_pipeline.graph: PipelineModulesGraph",
    "experimental.nn":
    "internal: torch_version; wrapping.activations: is_checkpointing, is_recomputing",
    "experimental.tooling.layer_memory_tracker": "nn.data_parallel: FullyShardedDataParallel",
    "experimental.wgit":
    "experimental.wgit.repo: Repo; experimental.wgit.signal_sparsity: SignalSparsity, random_sparse_mask; "
    "experimental.wgit.signal_sparsity_profiling: EnergyConcentrationProfile",
    "experimental.wgit.cli": "experimental.wgit: __version_tuple__ as version; experimental.wgit.repo: Repo",
    "experimental.wgit.repo":
    "experimental.wgit: RepoStatus; experimental.wgit.pygit: PyGit; experimental.wgit.sha1_store: "
    "SHA1_Store",
    "experimental.wgit.sha1_store": "experimental.wgit: ExitCode; internal.params: from_np, to_np",
    "experimental.wgit.signal_sparsity": "experimental.wgit: Algo",
    "experimental.wgit.utils": "experimental.wgit: Algo, ExitCode, RepoStatus",
    "experimental.wgit.version": "experimental.wgit: __version_tuple__",
    "fair_dev.common_paths": "fair_dev: DATASET_CACHE_ROOT",
    "fair_dev.testing.testing": "internal: torch_version",
    "fair_dev.testing.testing_memory": "fair_dev.testing.testing: find_tensor_by_shape",
    "internal.object": "internal.params: pyobject_to_tensor, tensor_to_pyobject",
    "internal.state_dict": "internal.params: find_module_instances, replace_by_prefix_",
    "internal.version": "internal: torch_version",
    "nn.checkpoint.checkpoint_activations":
    "internal.params: pack_kwargs, split_non_tensors, unpack_kwargs, unpack_non_tensors; "
    "nn.checkpoint: _accelerator, autocast, checkpoint_wrapper, get_rng_state, is_autocast_enabled, "
    "set_rng_state; wrapping.activations: CheckpointFunction, ThreadLocalCheckpointingState, "
    "disable_checkpointing, enable_checkpointing, enable_recomputing, is_checkpointing, is_recomputing, "
    "patch_batchnorm, thread_local",
    "nn.checkpoint.checkpoint_utils": "wrapping.activations: patch_batchnorm",
    "nn.data_parallel":
    "flattening.bucket: GradBucket; flattening.wrapper: no_key_translation as no_pre_load_state_dict_hook; "
    "flattening.wrapper: FlattenParamsWrapper; internal.params: ReduceScatterBucketer, Workhandle, apply_to_tensors, "
    "calc_grad_norm, chunk_and_pad, enable_nccl_base_collectives, enable_pytorch_sync_bn, get_global_rank, "
    "recursive_copy_to_device, replace_by_prefix_, validate_process_group; nn.data_parallel: fsdp_optim_utils as ou",
    "nn.data_parallel.fsdp_optim_utils":
    "flattening.wrapper: FlattenParamsWrapper; nn.data_parallel: check_param_counts_before_sharding, "
    "is_singleton_tensor",
    "nn.misc.flatten_params_wrapper":
    "flattening.wrapper: FlatParameter, ParamGroups, WRAPPED; flattening.wrapper: "
    "FlattenParamsWrapper; internal.params: replace_by_prefix_; nn.misc: _post_state_dict_hook, "
    "_pre_load_state_dict_hook",
    "nn.misc.param_bucket": "flattening.bucket: Bucket, GradBucket, ParamBucket",
    "nn.model_parallel.cross_entropy":
    "model_parallel.groups: VocabUtility, get_model_parallel_group, get_model_parallel_rank, "
    "get_model_parallel_world_size; model_parallel.regions: vocab_parallel_cross_entropy",
    "nn.model_parallel.layers":
    "model_parallel.groups: VocabUtility, divide_and_check_no_remainder, get_model_parallel_rank, "
    "get_model_parallel_world_size; model_parallel.layers: ColumnParallelLinear, ParallelEmbedding, "
    "RowParallelLinear, VocabParallelEmbedding, initialize_affine_weight as _initialize_affine_weight; "
    "model_parallel.regions: copy_to_model_parallel_region, gather_from_model_parallel_region, "
    "reduce_from_model_parallel_region, scatter_to_model_parallel_region",
    "nn.model_parallel.mappings":
    "model_parallel.groups: get_model_parallel_group, split_tensor_along_last_dim; "
    "model_parallel.regions: copy_to_model_parallel_region, gather_from_model_parallel_region, "
    "reduce_from_model_parallel_region, scatter_to_model_parallel_region",
    "nn.model_parallel.random":
    "model_parallel.groups: CudaRNGStatesTracker, checkpoint, get_cuda_rng_tracker, get_data_parallel_rank, "
    "get_model_parallel_rank, model_parallel_cuda_manual_seed",
    "nn.model_parallel.utils":
    "model_parallel.groups: VocabUtility, divide_and_check_no_remainder, ensure_divisibility, "
    "split_tensor_along_last_dim",
    "nn.moe.moe_layer": "model_parallel.moe: AllToAll as _AllToAll; nn.moe: MOELayer",
    "nn.moe.top2gate":
    "model_parallel.moe: Top2Gate, gumbel_rsample, one_hot, top2gating; nn.moe: gumbel_map",
    "nn.pipe.async_pipe":
    "model_parallel.groups: get_pipeline_parallel_group; nn.pipe: microbatch; nn.pipe.async_pipeline: "
    "AsyncPipeline; nn.pipe.async_schedule: Invocation, Location, ModuleWrapper; nn.pipe.parts: "
    "LazyModule, Tensors, check_balance, verify_module; nn.pipe.skip.skippable: Skippable; "
    "pipeline.async_pipe: AsyncPipe; pipeline.microbatch: DeferredBatchNorm, Value "
    "as TensorOrTensors; pipeline.pipe: MOVING_DENIED; pipeline.skip: SkipLayout",
    "nn.pipe.async_pipeline":
    "nn.pipe.async_schedule: AsyncEventLoop, ModuleWrapper; nn.pipe.messages: MakeTransport; "
    "nn.pipe.skip.tracker: SkipTrackerThroughPotals; pipeline.microbatch: Batch; pipeline.skip: "
    "SkipLayout",
    "nn.pipe.async_schedule":
    "model_parallel.groups: get_pipeline_parallel_ranks; nn.pipe.messages: Transport; nn.pipe.parts: "
    "Checkpointing; nn.pipe.skip.tracker: SkipTrackerThroughPotals, use_skip_tracker; nn.pipe.types: "
    "PipeMessage; nn.pipe.worker: Task; pipeline.microbatch: Batch",
    "nn.pipe.balance":
    "nn.pipe.parts: TensorOrTensors, Tensors, balance_by_size, balance_by_time, profile_sizes, "
    "profile_times; pipeline.pipe: Device",
    "nn.pipe.balance.blockpartition": "nn.pipe.parts: solve",
    "nn.pipe.balance.profile":
    "nn.pipe.parts: Tensors, detach, layerwise_sandbox, profile_sizes, profile_times; "
    "pipeline.microbatch: Batch, Value as TensorOrTensors; pipeline.pipe: Device",
    "nn.pipe.batchnorm":
    "pipeline.microbatch: DeferredBatchNorm, TModule; wrapping.activations: is_recomputing",
    "nn.pipe.checkpoint":
    "nn.pipe.parts: CheckpointedFunction as Function, Checkpointing, TensorOrTensors, Tensors, _UNKNOWN, "
    "fork, get_phony, join; pipeline.microbatch: Batch; wrapping.activations: "
    "ThreadLocalCheckpointingState as ThreadLocal, enable_checkpointing, enable_recomputing, "
    "is_checkpointing, is_recomputing, thread_local",
    "nn.pipe.copy":
    "nn.pipe.parts: Tensors, current_stream, get_device, record_stream, use_stream, wait_stream",
    "nn.pipe.dependency": "nn.pipe.parts: Fork, Join, fork, get_phony, join",
    "nn.pipe.messages":
    "internal.params: pyobject_to_tensor, tensor_to_pyobject; model_parallel.groups: "
    "get_pipeline_parallel_group; nn.pipe.types: PipeMessage",
    "nn.pipe.microbatch":
    "nn.pipe.parts: BatchFunction as Function, TensorOrTensors, Tensors, gather, scatter; "
    "pipeline.microbatch: Batch, check",
    "nn.pipe.phony": "nn.pipe.parts: default_stream, get_phony, use_stream",
    "nn.pipe.pipe":
    "internal: torch_version; nn.pipe: microbatch; nn.pipe.parts: Devices, Module, Tensors, new_stream, "
    "recommend_auto_balance, split_module, verify_splitting; nn.pipe.pipeline: Pipeline; "
    "pipeline.microbatch: BalanceError, DeferredBatchNorm, Value as TensorOrTensors, verify_module; "
    "pipeline.pipe: Device, MOVING_DENIED, Pipe; "
    "pipeline.skip: inspect_skip_layout, verify_skippables",
    "nn.pipe.pipeline":
    "nn.pipe.copy: Copy, Wait; nn.pipe.parts: Checkpointing, Tensors, current_stream, fork, join, "
    "use_device; nn.pipe.skip.tracker: SkipTrackerThroughPotals, use_skip_tracker; nn.pipe.worker: Task, "
    "create_workers, join_workers; pipeline.microbatch: Batch, Value as TensorOrTensors; "
    "pipeline.pipe: ticks as clock_cycles; pipeline.skip: SkipLayout",
    "nn.pipe.rpc":
    "model_parallel.groups: get_pipeline_parallel_group; nn.pipe.types: PipeMessage; pipeline.async_pipe: "
    "AsyncPipe, PipeRPCWrapper; pipeline.microbatch: Value as TensorOrTensors",
    "nn.pipe.skip.layout": "pipeline.skip: Namespace, SkipLayout, inspect_skip_layout",
    "nn.pipe.skip.namespace": "pipeline.skip: Namespace",
    "nn.pipe.skip.portal":
    "nn.pipe.copy: Context as CopyContext, Copy; nn.pipe.parts: get_device, get_phony; pipeline.skip: "
    "Namespace",
    "nn.pipe.skip.skippable":
    "nn.pipe.parts: SkippableT as T, StashPopGenerator, TensorOrTensors, Tensors; nn.pipe.skip.tracker: "
    "current_skip_tracker; pipeline.microbatch: Batch; pipeline.skip: Namespace, Skippable, StashPop, pop, "
    "skippable, stash, verify_skippables",
    "nn.pipe.skip.tracker":
    "nn.pipe.parts: fork, join; nn.pipe.skip.portal: Portal; pipeline.microbatch: Batch; pipeline.skip: "
    "Namespace, SkipLayout; wrapping.activations: is_checkpointing",
    "nn.pipe.stream":
    "nn.pipe.parts: AbstractStream, CPUStream, CPUStreamType, as_cuda, current_stream, default_stream, "
    "get_device, is_cuda, new_stream, record_stream, use_device, use_stream, wait_stream",
    "nn.pipe.types":
    "nn.pipe.parts: InputDevice, Tensors; pipeline.async_pipe: LazyModule; pipeline.microbatch: Value as "
    "TensorOrTensors",
    "nn.pipe.worker": "nn.pipe.parts: use_device, use_stream; pipeline.microbatch: Batch",
    "optim.grad_scaler":
    "internal: torch_version; optim: GradScaler, OptState, ShardedGradScaler",
    "optim":
    "flattening.bucket: ParamBucket; internal.params: calc_grad_norm, recursive_copy_to_device",
    "training_checkpoints.handles": "checkpoint.saving: Handle",
    "training_checkpoints.rank_states": "checkpoint.rank_states: TakesRankStates",
}
# fmt: on


def origins(path: str) -> dict[str, tuple[str, str]]:
    """Finds where each name is that a module has from elsewhere, and what it is called there."""
    found = {}
    for part in REEXPORTED[path].split("; ") if path in REEXPORTED else ():
        home, _, names = part.partition(": ")
        for entry in names.split(", "):
            there, _, here = entry.partition(" as ")
            found[here or there] = home, there
    return found
