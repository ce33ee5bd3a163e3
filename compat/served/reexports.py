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
    "extra.dynamic_loss_scaler": "experimental.optim.dynamic_loss_scaler",
    "extra.gossip": "experimental.nn.data_parallel.gossip",
    "extra.layerwise_gradient_scaler": "optim.layerwise_gradient_scaler",
    "extra.memory_tracker": "experimental.tooling.memory_tracker",
    "extra.offload": "experimental.nn.offload",
    "extra.vocab_loss": "model_parallel.vocab_loss",
    "extra.vocab_output": "experimental.nn.mevo",
    "grad_scaler": "training.grad_scaler",
    "moe": "model_parallel.moe",
    "out_of_memory": "training.out_of_memory",
    "pipeline.remote_pipe": "pipeline.async_pipe",
    "rehearsal": "tools.rehearsal",
    "testing": "tools.verify",
    "torch_fsdp2": "torch_fsdp.fsdp2",
    "utils.testing": "fair_dev.testing.testing",
    "whole_parameters": "training.whole_parameters",
}

# Path of a module -> where its names are, below shardkit -> the names, as in an import.
# fmt: off
REEXPORTED: dict[str, dict[str, str]] = {
    "experimental.nn.ampnet_pipe.ampnet": {
        "nn.model_parallel.initialize": "get_pipeline_parallel_ranks",
        "nn.pipe.async_schedule": "AsyncMessageBody, AsyncMessageType, AsyncRecvOperator, Location, ModuleWrapper",
        "nn.pipe.checkpoint": "Checkpointing",
        "nn.pipe.messages": "Transport",
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.types": "PipeMessage",
        "nn.pipe.worker": "Task",
    },
    "experimental.nn.ampnet_pipe.pipe": {
        "experimental.nn.ampnet_pipe.ampnet": "AsyncAMPnetEventLoop",
        "nn.pipe.async_pipe": "AsyncPipe",
    },
    "experimental.nn.data_parallel.gossip": {
        "experimental.nn.data_parallel.gossip.utils.cuda_metering": "CudaEventRecorder",
        "experimental.nn.data_parallel.gossip.gossiper": "PushPull, PushSum",
        "experimental.nn.data_parallel.gossip.graph_manager":
        "DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph, DynamicDirectedExponentialGraph, "
        "DynamicDirectedLinearGraph, GraphManager, NPeerDynamicDirectedExponentialGraph, RingGraph",
        "experimental.nn.data_parallel.gossip.utils.helpers": "communicate",
        "experimental.nn.data_parallel.gossip.mixing_manager": "MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.distributed": {
        "experimental.nn.data_parallel.gossip.utils.cuda_metering": "EventRecorder, create_event_recorder",
        "experimental.nn.data_parallel.gossip.utils.helpers":
        "communicate, create_process_group, flatten_tensors, group_by_dtype, make_logger, unflatten_tensors",
        "experimental.nn.data_parallel.gossip.gossiper": "Gossiper, PushPull, PushSum",
        "experimental.nn.data_parallel.gossip.graph_manager": "NPeerDynamicDirectedExponentialGraph as NPDDEGraph",
        "experimental.nn.data_parallel.gossip.mixing_manager": "UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.gossiper": {
        "experimental.nn.data_parallel.gossip.graph_manager": "GraphManager",
        "experimental.nn.data_parallel.gossip.mixing_manager": "MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.mixing_manager": {
        "experimental.nn.data_parallel.gossip.graph_manager": "GraphManager, MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.utils": {
        "experimental.nn.data_parallel.gossip.utils.helpers":
        "MultiProcessAdapter, communicate, create_process_group, flatten_tensors, group_by_dtype, make_logger, "
        "unflatten_tensors",
    },
    "experimental.nn.data_parallel.gossip.utils.cuda_metering": {
        "experimental.nn.data_parallel.gossip.utils":
        "DummyCudaEventRecorder, EventRecorder, MAX_LEN_DEQUEUE, create_event_recorder, deque_with_max_len_fixed",
    },
    "experimental.nn.data_parallel.gossip.utils.helpers": {
        "experimental.nn.data_parallel.gossip.utils":
        "HANDLER_AND_LEVEL_SET, MultiProcessAdapter, communicate, create_process_group, flatten_tensors, "
        "group_by_dtype, make_logger, unflatten_tensors",
    },
    "experimental.nn.distributed_pipeline": {
        "experimental.nn.distributed_pipeline.graph": "PipelineModulesGraph",
        "experimental.nn.distributed_pipeline.loss": "DistributedLoss",
        "experimental.nn.distributed_pipeline.pipeline": "DistributedPipeline",
    },
    "experimental.nn.distributed_pipeline.graph": {"experimental.nn.distributed_pipeline.data": "DataConsumer"},
    "experimental.nn.distributed_pipeline.partition_handler": {
        "experimental.nn.distributed_pipeline.data": "DataConsumer",
        "nn.pipe": "microbatch",
        "nn.pipe.checkpoint": "Checkpointing",
        "nn.pipe.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.stream": "as_cuda, current_stream, is_cuda, use_device, use_stream",
        "nn.pipe.worker": "Task, create_workers",
    },
    "experimental.nn.distributed_pipeline.pipeline": {
        "experimental.nn.distributed_pipeline.data": "DataConsumer",
        "experimental.nn.distributed_pipeline.graph": "Node, PipelineModulesGraph",
        "experimental.nn.distributed_pipeline.partition_handler": "DistributedPipelineRecord, PartitionHandler",
        "internal.version": "torch_version",
        "nn.pipe": "microbatch",
    },
    "experimental.nn.distributed_pipeline.trace": {
        "experimental.nn.distributed_pipeline.graph": "PipelineModulesGraph",
    },
    "experimental.nn.sync_batchnorm": {
        "wrapping.activations": "is_checkpointing, is_recomputing",
        "internal.version": "torch_version",
    },
    "experimental.optim.dynamic_loss_scaler": {
        "experimental.optim": "DynamicLossScaler, OptState, _all_finite, _gradients",
    },
    "experimental.tooling.layer_memory_tracker": {
        "experimental.tooling.memory_tracker":
        "LayerMemoryTrace, LayerwiseMemoryTracker, LayerwiseMemoryTrackerSummary, ProcessGroupTracker, "
        "ProcessGroupTrackingEvent, SuggestedCheckpoints, TraceBackwardEvent, TraceForwardEvent, "
        "compare_memory_traces_in_plot, find_best_reset_points, matplotlib_figure_to_image, null_context, "
        "suggest_checkpoint_location",
        "nn.data_parallel": "FullyShardedDataParallel",
    },
    "experimental.wgit": {
        "experimental.wgit.repo": "Repo",
        "experimental.wgit.signal_sparsity": "SignalSparsity, random_sparse_mask",
        "experimental.wgit.signal_sparsity_profiling": "EnergyConcentrationProfile",
    },
    "experimental.wgit.cli": {
        "experimental.wgit.repo": "Repo",
        "experimental.wgit.version": "__version_tuple__ as version",
    },
    "experimental.wgit.repo": {
        "experimental.wgit.pygit": "PyGit",
        "experimental.wgit.sha1_store": "SHA1_Store",
        "experimental.wgit.utils": "RepoStatus",
    },
    "experimental.wgit.sha1_store": {
        "experimental.wgit.utils": "ExitCode",
        "internal.containers": "from_np, to_np",
    },
    "experimental.wgit.signal_sparsity": {"experimental.wgit.utils": "Algo"},
    "experimental.wgit.utils": {"experimental.wgit": "Algo, ExitCode, RepoStatus"},
    "experimental.wgit.version": {"experimental.wgit": "__version_tuple__"},
    "fair_dev.common_paths": {"fair_dev": "DATASET_CACHE_ROOT"},
    "fair_dev.testing.spawning": {
        "fair_dev.testing.testing":
        "dist_init, get_worker_map, get_world_sizes, make_cudnn_deterministic, rmf, spawn_for_all_world_sizes, "
        "teardown, temp_files_ctx, test_runner, torch_spawn, worker_process",
    },
    "fair_dev.testing.testing": {
        "fair_dev.testing.models": "DeviceAndTypeCheckModule, GPT2, IdentityLayer",
        "fair_dev.testing.spawning":
        "dist_init, get_worker_map, get_world_sizes, make_cudnn_deterministic, rmf, spawn_for_all_world_sizes, "
        "teardown, temp_files_ctx, test_runner, torch_spawn, worker_process",
        "internal.version": "torch_version",
        "nn.model_parallel.initialize": "destroy_model_parallel, initialize_model_parallel",
    },
    "fair_dev.testing.testing_memory": {"fair_dev.testing.testing": "find_tensor_by_shape"},
    "internal.object": {"internal.containers": "pyobject_to_tensor, tensor_to_pyobject"},
    "internal.params": {"internal.containers": "recursive_copy_to_device"},
    "internal.state_dict": {"internal.containers": "find_module_instances, replace_by_prefix_"},
    "internal.version": {"internal": "torch_version"},
    "nn.auto_wrap": {
        "nn.wrap.auto_wrap": "ConfigAutoWrap, default_auto_wrap_policy, enable_wrap",
        "wrapping.context": "auto_wrap, wrap",
        "wrapping.policies": "config_auto_wrap_policy",
    },
    "nn.checkpoint.checkpoint_activations": {
        "wrapping.activations":
        "CheckpointFunction, ThreadLocalCheckpointingState, disable_checkpointing, enable_checkpointing, "
        "enable_recomputing, is_checkpointing, is_recomputing, patch_batchnorm, thread_local",
        "internal.containers": "pack_kwargs, split_non_tensors, unpack_kwargs, unpack_non_tensors",
        "nn.checkpoint":
        "_accelerator, autocast, checkpoint_wrapper, get_rng_state, is_autocast_enabled, set_rng_state",
    },
    "nn.checkpoint.checkpoint_utils": {"wrapping.activations": "patch_batchnorm"},
    "nn.data_parallel.fsdp_optim_utils": {
        "flattening.wrapper": "FlattenParamsWrapper",
        "nn.data_parallel.fsdp_facts": "check_param_counts_before_sharding, is_singleton_tensor",
    },
    "nn.data_parallel.fully_sharded_data_parallel": {
        "internal.containers": "apply_to_tensors, recursive_copy_to_device",
        "internal.parallel": "chunk_and_pad, enable_pytorch_sync_bn, validate_process_group",
        "internal.reduce_scatter_bucketer": "ReduceScatterBucketer, enable_nccl_base_collectives",
        "flattening.keys": "no_key_translation as no_pre_load_state_dict_hook",
        "flattening.wrapper": "FlattenParamsWrapper",
        "internal.params": "calc_grad_norm",
        "internal.state_dict": "replace_by_prefix_",
        "nn.data_parallel": "fsdp_optim_utils as ou",
        "nn.data_parallel.fsdp_facts": "TrainingState",
    },
    "nn.data_parallel.sharded_ddp": {
        "flattening.bucket": "GradBucket",
        "internal.params": "Workhandle, get_global_rank",
    },
    "nn.misc.checkpoint_activations": {
        "wrapping.activations":
        "CheckpointFunction, disable_checkpointing, enable_checkpointing, enable_recomputing, is_checkpointing, "
        "is_recomputing, patch_batchnorm",
        "nn.checkpoint.checkpoint_activations": "checkpoint_wrapper",
    },
    "nn.misc.flatten_params_wrapper": {
        "flattening.flat_parameter": "FlatParameter, ParamGroups",
        "flattening.wrapper": "FlattenParamsWrapper",
        "internal.state_dict": "replace_by_prefix_",
        "nn.misc": "_post_state_dict_hook, _pre_load_state_dict_hook",
        "flattening.keys": "WRAPPED",
    },
    "nn.misc.param_bucket": {"flattening.bucket": "Bucket, GradBucket, ParamBucket"},
    "nn.model_parallel.cross_entropy": {
        "model_parallel.regions": "vocab_parallel_cross_entropy",
        "nn.model_parallel.initialize":
        "get_model_parallel_group, get_model_parallel_rank, get_model_parallel_world_size",
        "nn.model_parallel.utils": "VocabUtility",
    },
    "nn.model_parallel.layers": {
        "model_parallel.layers":
        "ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding, "
        "initialize_affine_weight as _initialize_affine_weight",
        "nn.model_parallel.initialize": "get_model_parallel_rank, get_model_parallel_world_size",
        "nn.model_parallel.mappings":
        "copy_to_model_parallel_region, gather_from_model_parallel_region, reduce_from_model_parallel_region, "
        "scatter_to_model_parallel_region",
        "nn.model_parallel.utils": "VocabUtility, divide_and_check_no_remainder",
    },
    "nn.model_parallel.mappings": {
        "model_parallel.regions":
        "copy_to_model_parallel_region, gather_from_model_parallel_region, reduce_from_model_parallel_region, "
        "scatter_to_model_parallel_region",
        "nn.model_parallel.initialize": "get_model_parallel_group",
        "nn.model_parallel.utils": "split_tensor_along_last_dim",
    },
    "nn.model_parallel.random": {
        "model_parallel.random":
        "CheckpointFunction, CudaRNGStatesTracker, checkpoint, get_cuda_rng_tracker, "
        "model_parallel_cuda_manual_seed",
        "nn.model_parallel.initialize": "get_data_parallel_rank, get_model_parallel_rank",
    },
    "nn.model_parallel.utils": {
        "model_parallel.groups":
        "VocabUtility, divide_and_check_no_remainder, ensure_divisibility, split_tensor_along_last_dim",
    },
    "nn.moe.moe_layer": {
        "model_parallel.moe": "AllToAll as _AllToAll",
        "nn.moe": "MOELayer",
    },
    "nn.moe.top2gate": {
        "model_parallel.moe": "Top2Gate, gumbel_rsample, one_hot, top2gating",
        "nn.moe": "gumbel_map",
    },
    "nn.pipe.async_pipe": {
        "nn.model_parallel.initialize": "get_pipeline_parallel_group",
        "nn.pipe": "microbatch",
        "nn.pipe.async_pipeline": "AsyncPipeline",
        "nn.pipe.async_schedule": "Invocation, Location, ModuleWrapper",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.skippable": "Skippable",
        "nn.pipe.types": "Tensors",
        "pipeline.async_pipe": "AsyncPipe",
        "pipeline.batch_norm": "DeferredBatchNorm",
        "pipeline.microbatch": "Value as TensorOrTensors",
        "pipeline.pipe": "MOVING_DENIED",
        "nn.pipe.parts": "LazyModule, check_balance, verify_module",
    },
    "nn.pipe.async_pipeline": {
        "nn.pipe.async_schedule": "AsyncEventLoop, ModuleWrapper",
        "nn.pipe.messages": "MakeTransport",
        "nn.pipe.microbatch": "Batch",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.tracker": "SkipTrackerThroughPotals",
    },
    "nn.pipe.async_schedule": {
        "nn.model_parallel.initialize": "get_pipeline_parallel_ranks",
        "nn.pipe.checkpoint": "Checkpointing",
        "nn.pipe.messages": "Transport",
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.skip.tracker": "SkipTrackerThroughPotals, use_skip_tracker",
        "nn.pipe.types": "PipeMessage",
        "nn.pipe.worker": "Task",
    },
    "nn.pipe.balance": {
        "nn.pipe.parts": "TensorOrTensors, Tensors, balance_by_size, balance_by_time",
        "pipeline.pipe": "Device",
        "pipeline.balance": "profile_sizes, profile_times",
    },
    "nn.pipe.balance.blockpartition": {"pipeline.balance": "solve"},
    "nn.pipe.balance.profile": {
        "nn.pipe.types": "Tensors",
        "pipeline.balance": "layerwise_sandbox, profile_sizes, profile_times",
        "pipeline.microbatch": "Batch, Value as TensorOrTensors",
        "nn.pipe.parts": "detach",
        "pipeline.pipe": "Device",
    },
    "nn.pipe.batchnorm": {
        "wrapping.activations": "is_recomputing",
        "pipeline.batch_norm": "DeferredBatchNorm, TModule",
    },
    "nn.pipe.checkpoint": {
        "wrapping.activations":
        "ThreadLocalCheckpointingState as ThreadLocal, enable_checkpointing, enable_recomputing, "
        "is_checkpointing, is_recomputing, thread_local",
        "nn.pipe.dependency": "fork, get_phony, join",
        "nn.pipe.types": "Tensors",
        "nn.pipe.parts": "Checkpointing, CheckpointedFunction as Function, TensorOrTensors, _UNKNOWN",
        "pipeline.microbatch": "Batch",
    },
    "nn.pipe.copy": {
        "nn.pipe.stream": "current_stream, get_device, record_stream, use_stream, wait_stream",
        "nn.pipe.types": "Tensors",
    },
    "nn.pipe.dependency": {"nn.pipe.parts": "Fork, Join, fork, get_phony, join"},
    "nn.pipe.messages": {
        "internal.object": "pyobject_to_tensor, tensor_to_pyobject",
        "nn.model_parallel.initialize": "get_pipeline_parallel_group",
        "nn.pipe.types": "PipeMessage",
    },
    "nn.pipe.microbatch": {
        "nn.pipe.types": "Tensors",
        "pipeline.microbatch": "Batch, check",
        "nn.pipe.parts": "BatchFunction as Function, TensorOrTensors, gather, scatter",
    },
    "nn.pipe.phony": {
        "nn.pipe.dependency": "get_phony",
        "nn.pipe.stream": "default_stream, use_stream",
    },
    "nn.pipe.pipe": {
        "internal.version": "torch_version",
        "nn.pipe": "microbatch",
        "nn.pipe.pipeline": "Pipeline",
        "pipeline.skip": "inspect_skip_layout, verify_skippables",
        "nn.pipe.stream": "new_stream",
        "nn.pipe.types": "Tensors",
        "pipeline.batch_norm": "DeferredBatchNorm",
        "pipeline.partition": "BalanceError, verify_module",
        "pipeline.microbatch": "Value as TensorOrTensors",
        "pipeline.pipe": "Device, MOVING_DENIED, Pipe",
        "nn.pipe.parts": "Devices, Module, recommend_auto_balance, split_module, verify_splitting",
    },
    "nn.pipe.pipeline": {
        "nn.pipe.checkpoint": "Checkpointing",
        "nn.pipe.copy": "Copy, Wait",
        "nn.pipe.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.tracker": "SkipTrackerThroughPotals, use_skip_tracker",
        "nn.pipe.stream": "current_stream, use_device",
        "nn.pipe.types": "TensorOrTensors, Tensors",
        "nn.pipe.worker": "Task, create_workers, join_workers",
        "pipeline.schedule": "ticks as clock_cycles",
    },
    "nn.pipe.rpc": {
        "nn.model_parallel.initialize": "get_pipeline_parallel_group",
        "nn.pipe.types": "PipeMessage",
        "pipeline.async_pipe": "AsyncPipe, PipeRPCWrapper",
        "pipeline.microbatch": "Value as TensorOrTensors",
    },
    "nn.pipe.skip.layout": {"pipeline.skip": "Namespace, SkipLayout, inspect_skip_layout"},
    "nn.pipe.skip.namespace": {"pipeline.skip": "Namespace"},
    "nn.pipe.skip.portal": {
        "nn.pipe.copy": "Context as CopyContext, Copy",
        "nn.pipe.dependency": "get_phony",
        "nn.pipe.skip.namespace": "Namespace",
        "nn.pipe.stream": "get_device",
    },
    "nn.pipe.skip.skippable": {
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.skip.tracker": "current_skip_tracker",
        "nn.pipe.types": "Tensors",
        "pipeline.skip": "Namespace, pop, skippable, stash, verify_skippables",
    },
    "nn.pipe.skip.tracker": {
        "nn.pipe.checkpoint": "is_checkpointing",
        "nn.pipe.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.namespace": "Namespace",
        "nn.pipe.skip.portal": "Portal",
    },
    "nn.pipe.stream": {
        "nn.pipe.parts":
        "AbstractStream, CPUStream, CPUStreamType, as_cuda, current_stream, default_stream, get_device, is_cuda, "
        "new_stream, record_stream, use_device, use_stream, wait_stream",
    },
    "nn.pipe.types": {
        "pipeline.async_pipe": "LazyModule",
        "pipeline.microbatch": "Value as TensorOrTensors",
        "nn.pipe.parts": "InputDevice, Tensors",
    },
    "nn.pipe.worker": {
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.stream": "use_device, use_stream",
    },
    "optim.grad_scaler": {
        "internal.version": "torch_version",
        "optim": "OptState",
        "training.grad_scaler": "GradScaler, ShardedGradScaler",
    },
    "optim.oss": {
        "internal.containers": "recursive_copy_to_device",
        "flattening.bucket": "ParamBucket",
        "internal.params": "calc_grad_norm",
    },
    "optim.utils": {"internal.params": "Workhandle, calc_grad_norm, get_global_rank"},
    "training_checkpoints.handles": {"checkpoint.background": "Handle"},
    "training_checkpoints.rank_states": {"checkpoint.rank_states": "TakesRankStates"},
    "utils.containers": {
        "internal.containers":
        "apply_to_tensors, apply_to_type, from_np, pack_kwargs, split_non_tensors, to_np, unpack_kwargs, "
        "unpack_non_tensors",
    },
    "utils.object": {"internal.object": "pyobject_to_tensor, tensor_to_pyobject"},
    "utils.parallel": {
        "internal.parallel":
        "ProcessGroupName, chunk_and_pad, enable_pytorch_sync_bn, get_process_group_cached, "
        "validate_process_group",
    },
    "utils.params": {
        "internal.containers": "recursive_copy_to_device",
        "internal.params": "Workhandle, calc_grad_norm, get_global_rank",
    },
    "utils.reduce_scatter_bucketer": {
        "internal.reduce_scatter_bucketer": "Bucket, ReduceScatterBucketer, enable_nccl_base_collectives",
    },
    "utils.state_dict": {"internal.state_dict": "find_module_instances, replace_by_prefix_"},
    "utils.version": {"internal.version": "torch_version"},
}
