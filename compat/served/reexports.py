"""Names that modules of fairscale, and of earlier versions of shardkit, have from elsewhere: one table.

:mod:`shardkit.compat.redirected` serves it.
"""

from __future__ import annotations

# Modules that have moved since 0.2.0 and may be imported by either name, all below shardkit: then -> now.
MOVED = {
    "activations": "wrapping.activations",
    "adascale": "training.adascale",
    "checkpoint_tools": "checkpoint.tools",
    "data": "training.data",
    "estimate": "tools.estimate",
    "evaluation": "training.evaluation",
    "extra.adam": "optim.adam",
    "extra.auto_shard": "experimental.nn.auto_shard",
    "experimental.nn.data_parallel.gossip.utils.helpers": "experimental.nn.data_parallel.gossip.utils",
    "experimental.optim.dynamic_loss_scaler": "experimental.optim",
    "extra.dynamic_loss_scaler": "experimental.optim",
    "extra.gossip": "experimental.nn.data_parallel.gossip",
    "extra.layerwise_gradient_scaler": "optim.layerwise_gradient_scaler",
    "experimental.tooling.memory_tracker": "experimental.tooling.layer_memory_tracker",
    "extra.memory_tracker": "experimental.tooling.layer_memory_tracker",
    "extra.offload": "experimental.nn.offload",
    "extra.vocab_loss": "model_parallel.vocab_loss",
    "extra.vocab_output": "experimental.nn.mevo",
    "fair_dev.testing.models": "fair_dev.testing.testing",
    "fair_dev.testing.spawning": "fair_dev.testing.testing",
    "grad_scaler": "training.grad_scaler",
    "moe": "model_parallel.moe",
    "out_of_memory": "training.out_of_memory",
    "pipeline.remote_pipe": "pipeline.async_pipe",
    "rehearsal": "tools.rehearsal",
    "testing": "tools.verify",
    "torch_fsdp2": "torch_fsdp.fsdp2",
    "utils": "internal",
    "utils.testing": "fair_dev.testing.testing",
    "whole_parameters": "training.whole_parameters",
}

# Where names are, below shardkit -> the names.
# fmt: off
_HOMES = {
    "checkpoint.background": "Handle",
    "checkpoint.rank_states": "TakesRankStates",
    "experimental.nn.ampnet_pipe.ampnet": "AsyncAMPnetEventLoop",
    "experimental.nn.data_parallel.gossip.gossiper": "Gossiper, PushPull, PushSum",
    "experimental.nn.data_parallel.gossip.graph_manager":
    "DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph, DynamicDirectedExponentialGraph, "
    "DynamicDirectedLinearGraph, GraphManager, MixingManager, NPeerDynamicDirectedExponentialGraph, "
    "RingGraph, UniformMixing",
    "experimental.nn.data_parallel.gossip.utils":
    "DummyCudaEventRecorder, EventRecorder, HANDLER_AND_LEVEL_SET, MAX_LEN_DEQUEUE, MultiProcessAdapter, "
    "communicate, create_event_recorder, create_process_group, deque_with_max_len_fixed, flatten_tensors, "
    "group_by_dtype, make_logger, unflatten_tensors",
    "experimental.nn.data_parallel.gossip.utils.cuda_metering": "CudaEventRecorder",
    "experimental.nn.distributed_pipeline.data": "DataConsumer",
    "experimental.nn.distributed_pipeline.graph": "Node, PipelineModulesGraph",
    "experimental.nn.distributed_pipeline.loss": "DistributedLoss",
    "experimental.nn.distributed_pipeline.partition_handler": "DistributedPipelineRecord, PartitionHandler",
    "experimental.nn.distributed_pipeline.pipeline": "DistributedPipeline",
    "experimental.wgit": "Algo, ExitCode, RepoStatus, __version_tuple__",
    "experimental.wgit.pygit": "PyGit",
    "experimental.wgit.repo": "Repo",
    "experimental.wgit.sha1_store": "SHA1_Store",
    "experimental.wgit.signal_sparsity": "SignalSparsity, random_sparse_mask",
    "experimental.wgit.signal_sparsity_profiling": "EnergyConcentrationProfile",
    "fair_dev": "DATASET_CACHE_ROOT",
    "fair_dev.testing.testing": "find_tensor_by_shape",
    "flattening.bucket": "Bucket, GradBucket, ParamBucket",
    "flattening.flat_parameter": "FlatParameter, ParamGroups",
    "flattening.keys": "WRAPPED, no_key_translation",
    "flattening.wrapper": "FlattenParamsWrapper",
    "internal": "torch_version",
    "internal.containers":
    "apply_to_tensors, apply_to_type, find_module_instances, from_np, pack_kwargs, pyobject_to_tensor, "
    "recursive_copy_to_device, replace_by_prefix_, split_non_tensors, tensor_to_pyobject, to_np, "
    "unpack_kwargs, unpack_non_tensors",
    "internal.parallel":
    "ProcessGroupName, chunk_and_pad, enable_pytorch_sync_bn, get_process_group_cached, "
    "validate_process_group",
    "internal.params": "Workhandle, calc_grad_norm, get_global_rank",
    "internal.reduce_scatter_bucketer": "ReduceScatterBucketer, enable_nccl_base_collectives",
    "model_parallel.groups":
    "VocabUtility, destroy_model_parallel, divide_and_check_no_remainder, ensure_divisibility, "
    "get_context_parallel_group, get_context_parallel_rank, get_context_parallel_ranks, "
    "get_context_parallel_world_size, get_data_parallel_group, get_data_parallel_rank, "
    "get_data_parallel_ranks, get_data_parallel_world_size, get_model_parallel_group, "
    "get_model_parallel_rank, get_model_parallel_src_rank, get_model_parallel_world_size, "
    "get_pipeline_parallel_group, get_pipeline_parallel_ranks, initialize_model_parallel, "
    "model_parallel_is_initialized, split_tensor_along_last_dim",
    "model_parallel.layers":
    "ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding, "
    "initialize_affine_weight",
    "model_parallel.moe": "AllToAll, Top2Gate, gumbel_rsample, one_hot, top2gating",
    "model_parallel.random":
    "CudaRNGStatesTracker, checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed",
    "model_parallel.regions":
    "copy_to_model_parallel_region, gather_from_model_parallel_region, reduce_from_model_parallel_region, "
    "scatter_to_model_parallel_region, vocab_parallel_cross_entropy",
    "nn.checkpoint":
    "_accelerator, autocast, checkpoint_wrapper, get_rng_state, is_autocast_enabled, set_rng_state",
    "nn.data_parallel": "FullyShardedDataParallel, fsdp_optim_utils",
    "nn.data_parallel.fsdp_facts": "TrainingState, check_param_counts_before_sharding, is_singleton_tensor",
    "nn.misc": "_post_state_dict_hook, _pre_load_state_dict_hook",
    "nn.moe": "MOELayer, gumbel_map",
    "nn.pipe": "microbatch",
    "nn.pipe.async_pipeline": "AsyncPipeline",
    "nn.pipe.async_schedule":
    "AsyncEventLoop, AsyncMessageBody, AsyncMessageType, AsyncRecvOperator, Invocation, Location, "
    "ModuleWrapper",
    "nn.pipe.copy": "Context, Copy, Wait",
    "nn.pipe.messages": "MakeTransport, Transport",
    "nn.pipe.parts":
    "AbstractStream, BatchFunction, CPUStream, CPUStreamType, CheckpointedFunction, Checkpointing, Devices, "
    "Fork, InputDevice, Join, LazyModule, Module, TensorOrTensors, Tensors, _UNKNOWN, as_cuda, "
    "balance_by_size, balance_by_time, check_balance, current_stream, default_stream, detach, fork, gather, "
    "get_device, get_phony, is_cuda, join, new_stream, recommend_auto_balance, record_stream, scatter, "
    "split_module, use_device, use_stream, verify_module, verify_splitting, wait_stream",
    "nn.pipe.pipeline": "Pipeline",
    "nn.pipe.skip.portal": "Portal",
    "nn.pipe.skip.skippable": "Skippable",
    "nn.pipe.skip.tracker": "SkipTrackerThroughPotals, current_skip_tracker, use_skip_tracker",
    "nn.pipe.types": "PipeMessage",
    "nn.pipe.worker": "Task, create_workers, join_workers",
    "nn.wrap.auto_wrap": "ConfigAutoWrap, default_auto_wrap_policy, enable_wrap",
    "pipeline.async_pipe": "AsyncPipe, PipeRPCWrapper",
    "pipeline.balance": "layerwise_sandbox, profile_sizes, profile_times, solve",
    "pipeline.batch_norm": "DeferredBatchNorm, TModule",
    "pipeline.microbatch": "Batch, Value, check",
    "pipeline.partition": "BalanceError",
    "pipeline.pipe": "Device, MOVING_DENIED, Pipe",
    "pipeline.schedule": "ticks",
    "pipeline.skip": "Namespace, SkipLayout, inspect_skip_layout, pop, skippable, stash, verify_skippables",
    "training.grad_scaler": "GradScaler, ShardedGradScaler",
    "wrapping.activations":
    "CheckpointFunction, ThreadLocalCheckpointingState, disable_checkpointing, enable_checkpointing, "
    "enable_recomputing, is_checkpointing, is_recomputing, patch_batchnorm, thread_local",
    "wrapping.context": "auto_wrap, wrap",
    "wrapping.policies": "config_auto_wrap_policy",
}

# Path of a module -> the names that it has from elsewhere, as in an import; with a path where two have that name.
REEXPORTED = {
    "experimental.nn.ampnet_pipe.ampnet":
    "AsyncMessageBody, AsyncMessageType, AsyncRecvOperator, Batch, Checkpointing, Location, ModuleWrapper, "
    "PipeMessage, Task, Transport, get_pipeline_parallel_ranks",
    "experimental.nn.ampnet_pipe.pipe": "AsyncAMPnetEventLoop, AsyncPipe",
    "experimental.nn.data_parallel.gossip":
    "CudaEventRecorder, DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph, "
    "DynamicDirectedExponentialGraph, DynamicDirectedLinearGraph, GraphManager, MixingManager, "
    "NPeerDynamicDirectedExponentialGraph, PushPull, PushSum, RingGraph, UniformMixing, communicate",
    "experimental.nn.data_parallel.gossip.distributed":
    "EventRecorder, Gossiper, NPeerDynamicDirectedExponentialGraph as NPDDEGraph, PushPull, PushSum, "
    "UniformMixing, communicate, create_event_recorder, create_process_group, flatten_tensors, "
    "group_by_dtype, make_logger, unflatten_tensors",
    "experimental.nn.data_parallel.gossip.gossiper": "GraphManager, MixingManager, UniformMixing",
    "experimental.nn.data_parallel.gossip.mixing_manager": "GraphManager, MixingManager, UniformMixing",
    "experimental.nn.data_parallel.gossip.utils.cuda_metering":
    "DummyCudaEventRecorder, EventRecorder, MAX_LEN_DEQUEUE, create_event_recorder, "
    "deque_with_max_len_fixed",
    "experimental.nn.distributed_pipeline": "DistributedLoss, DistributedPipeline, PipelineModulesGraph",
    "experimental.nn.distributed_pipeline.graph": "DataConsumer",
    "experimental.nn.distributed_pipeline.partition_handler":
    "Batch, Checkpointing, DataConsumer, Task, as_cuda, create_workers, current_stream, fork, is_cuda, "
    "join, microbatch, use_device, use_stream",
    "experimental.nn.distributed_pipeline.pipeline":
    "DataConsumer, DistributedPipelineRecord, Node, PartitionHandler, PipelineModulesGraph, microbatch, "
    "torch_version",
    "experimental.nn.distributed_pipeline.trace": "PipelineModulesGraph",
    "experimental.nn.sync_batchnorm": "is_checkpointing, is_recomputing, torch_version",
    "experimental.tooling.layer_memory_tracker": "FullyShardedDataParallel",
    "experimental.wgit": "EnergyConcentrationProfile, Repo, SignalSparsity, random_sparse_mask",
    "experimental.wgit.cli": "Repo, __version_tuple__ as version",
    "experimental.wgit.repo": "PyGit, RepoStatus, SHA1_Store",
    "experimental.wgit.sha1_store": "ExitCode, from_np, to_np",
    "experimental.wgit.signal_sparsity": "Algo",
    "experimental.wgit.utils": "Algo, ExitCode, RepoStatus",
    "experimental.wgit.version": "__version_tuple__",
    "fair_dev.common_paths": "DATASET_CACHE_ROOT",
    "fair_dev.testing.testing":
    "destroy_model_parallel, initialize_model_parallel, torch_version",
    "fair_dev.testing.testing_memory": "find_tensor_by_shape",
    "internal.object": "pyobject_to_tensor, tensor_to_pyobject",
    "internal.params": "recursive_copy_to_device",
    "internal.state_dict": "find_module_instances, replace_by_prefix_",
    "internal.version": "torch_version",
    "nn.auto_wrap":
    "ConfigAutoWrap, auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap",
    "nn.checkpoint.checkpoint_activations":
    "CheckpointFunction, ThreadLocalCheckpointingState, _accelerator, autocast, checkpoint_wrapper, "
    "disable_checkpointing, enable_checkpointing, enable_recomputing, get_rng_state, is_autocast_enabled, "
    "is_checkpointing, is_recomputing, pack_kwargs, patch_batchnorm, set_rng_state, split_non_tensors, "
    "thread_local, unpack_kwargs, unpack_non_tensors",
    "nn.checkpoint.checkpoint_utils": "patch_batchnorm",
    "nn.data_parallel.fsdp_optim_utils":
    "FlattenParamsWrapper, check_param_counts_before_sharding, is_singleton_tensor",
    "nn.data_parallel.fully_sharded_data_parallel":
    "FlattenParamsWrapper, ReduceScatterBucketer, TrainingState, apply_to_tensors, calc_grad_norm, "
    "chunk_and_pad, enable_nccl_base_collectives, enable_pytorch_sync_bn, no_key_translation as "
    "no_pre_load_state_dict_hook, fsdp_optim_utils as ou, recursive_copy_to_device, replace_by_prefix_, "
    "validate_process_group",
    "nn.data_parallel.sharded_ddp": "GradBucket, Workhandle, get_global_rank",
    "nn.misc.checkpoint_activations":
    "CheckpointFunction, checkpoint_wrapper, disable_checkpointing, enable_checkpointing, "
    "enable_recomputing, is_checkpointing, is_recomputing, patch_batchnorm",
    "nn.misc.flatten_params_wrapper":
    "FlatParameter, FlattenParamsWrapper, ParamGroups, WRAPPED, _post_state_dict_hook, "
    "_pre_load_state_dict_hook, replace_by_prefix_",
    "nn.misc.param_bucket": "Bucket, GradBucket, ParamBucket",
    "nn.model_parallel.cross_entropy":
    "VocabUtility, get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size, "
    "vocab_parallel_cross_entropy",
    "nn.model_parallel.initialize":
    "destroy_model_parallel, ensure_divisibility, get_context_parallel_group, get_context_parallel_rank, "
    "get_context_parallel_ranks, get_context_parallel_world_size, get_data_parallel_group, "
    "get_data_parallel_rank, get_data_parallel_ranks, get_data_parallel_world_size, "
    "get_model_parallel_group, get_model_parallel_rank, get_model_parallel_src_rank, "
    "get_model_parallel_world_size, get_pipeline_parallel_group, get_pipeline_parallel_ranks, "
    "initialize_model_parallel, model_parallel_is_initialized",
    "nn.model_parallel.layers":
    "ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding, VocabUtility, "
    "initialize_affine_weight as _initialize_affine_weight, copy_to_model_parallel_region, "
    "divide_and_check_no_remainder, gather_from_model_parallel_region, get_model_parallel_rank, "
    "get_model_parallel_world_size, reduce_from_model_parallel_region, scatter_to_model_parallel_region",
    "nn.model_parallel.mappings":
    "copy_to_model_parallel_region, gather_from_model_parallel_region, get_model_parallel_group, "
    "reduce_from_model_parallel_region, scatter_to_model_parallel_region, split_tensor_along_last_dim",
    "nn.model_parallel.random":
    "CudaRNGStatesTracker, checkpoint, get_cuda_rng_tracker, get_data_parallel_rank, "
    "get_model_parallel_rank, model_parallel_cuda_manual_seed",
    "nn.model_parallel.utils":
    "VocabUtility, divide_and_check_no_remainder, ensure_divisibility, split_tensor_along_last_dim",
    "nn.moe.moe_layer": "MOELayer, AllToAll as _AllToAll",
    "nn.moe.top2gate": "Top2Gate, gumbel_map, gumbel_rsample, one_hot, top2gating",
    "nn.pipe.async_pipe":
    "AsyncPipe, AsyncPipeline, DeferredBatchNorm, Invocation, LazyModule, Location, MOVING_DENIED, "
    "ModuleWrapper, SkipLayout, Skippable, Value as TensorOrTensors, Tensors, check_balance, "
    "get_pipeline_parallel_group, microbatch, verify_module",
    "nn.pipe.async_pipeline":
    "AsyncEventLoop, Batch, MakeTransport, ModuleWrapper, SkipLayout, SkipTrackerThroughPotals",
    "nn.pipe.async_schedule":
    "Batch, Checkpointing, PipeMessage, SkipTrackerThroughPotals, Task, Transport, "
    "get_pipeline_parallel_ranks, use_skip_tracker",
    "nn.pipe.balance":
    "Device, TensorOrTensors, Tensors, balance_by_size, balance_by_time, profile_sizes, profile_times",
    "nn.pipe.balance.blockpartition": "solve",
    "nn.pipe.balance.profile":
    "Batch, Device, Value as TensorOrTensors, Tensors, detach, layerwise_sandbox, profile_sizes, "
    "profile_times",
    "nn.pipe.batchnorm": "DeferredBatchNorm, TModule, is_recomputing",
    "nn.pipe.checkpoint":
    "Batch, Checkpointing, CheckpointedFunction as Function, TensorOrTensors, Tensors, "
    "ThreadLocalCheckpointingState as ThreadLocal, _UNKNOWN, enable_checkpointing, enable_recomputing, "
    "fork, get_phony, is_checkpointing, is_recomputing, join, thread_local",
    "nn.pipe.copy": "Tensors, current_stream, get_device, record_stream, use_stream, wait_stream",
    "nn.pipe.dependency": "Fork, Join, fork, get_phony, join",
    "nn.pipe.messages": "PipeMessage, get_pipeline_parallel_group, pyobject_to_tensor, tensor_to_pyobject",
    "nn.pipe.microbatch":
    "Batch, BatchFunction as Function, TensorOrTensors, Tensors, check, gather, scatter",
    "nn.pipe.phony": "default_stream, get_phony, use_stream",
    "nn.pipe.pipe":
    "BalanceError, DeferredBatchNorm, Device, Devices, MOVING_DENIED, Module, Pipe, Pipeline, Value as "
    "TensorOrTensors, Tensors, inspect_skip_layout, microbatch, new_stream, "
    "pipeline.partition.verify_module, recommend_auto_balance, split_module, torch_version, "
    "verify_skippables, verify_splitting",
    "nn.pipe.pipeline":
    "Batch, Checkpointing, Copy, SkipLayout, SkipTrackerThroughPotals, Task, Value as TensorOrTensors, "
    "Tensors, Wait, ticks as clock_cycles, create_workers, current_stream, fork, join, join_workers, "
    "use_device, use_skip_tracker",
    "nn.pipe.rpc":
    "AsyncPipe, PipeMessage, PipeRPCWrapper, Value as TensorOrTensors, get_pipeline_parallel_group",
    "nn.pipe.skip.layout": "Namespace, SkipLayout, inspect_skip_layout",
    "nn.pipe.skip.namespace": "Namespace",
    "nn.pipe.skip.portal": "Copy, Context as CopyContext, Namespace, get_device, get_phony",
    "nn.pipe.skip.skippable":
    "Batch, Namespace, Tensors, current_skip_tracker, pop, skippable, stash, verify_skippables",
    "nn.pipe.skip.tracker": "Batch, Namespace, Portal, SkipLayout, fork, is_checkpointing, join",
    "nn.pipe.stream":
    "AbstractStream, CPUStream, CPUStreamType, as_cuda, current_stream, default_stream, get_device, "
    "is_cuda, new_stream, record_stream, use_device, use_stream, wait_stream",
    "nn.pipe.types": "InputDevice, Value as TensorOrTensors, Tensors, pipeline.async_pipe.LazyModule",
    "nn.pipe.worker": "Batch, use_device, use_stream",
    "optim.grad_scaler": "GradScaler, ShardedGradScaler, optim.OptState, torch_version",
    "optim.oss": "ParamBucket, calc_grad_norm, recursive_copy_to_device",
    "optim.utils": "Workhandle, calc_grad_norm, get_global_rank",
    "training_checkpoints.handles": "Handle",
    "training_checkpoints.rank_states": "TakesRankStates",
}
# fmt: on

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split(", ")}


def origins(path: str) -> dict[str, tuple[str, str]]:
    """Finds where each name is that a module has from elsewhere, and what it is called there."""
    found = {}
    for entry in REEXPORTED[path].split(", ") if path in REEXPORTED else ():
        there, _, here = entry.partition(" as ")
        home, _, name = there.rpartition(".")
        found[here or name] = home or _HOME_OF[name], name
    return found
