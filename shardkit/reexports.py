"""Names that modules of fairscale, and of earlier versions of shardkit, have from elsewhere: one table.

:mod:`shardkit.redirected` serves it.
"""

from __future__ import annotations

# Modules that have moved since 0.2.0 and may be imported by either name, all below shardkit: then -> now.
MOVED = {
    "checkpoint_tools": "checkpoint.tools",
    "estimate": "tools.estimate",
    "rehearsal": "tools.rehearsal",
    "testing": "tools.verify",
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
    "experimental.nn.auto_shard": {"extra.auto_shard": "shard_model"},
    "experimental.nn.data_parallel.gossip": {
        "experimental.nn.data_parallel.gossip.utils.cuda_metering": "CudaEventRecorder",
        "extra.gossip": "SlowMoBaseAlgorithm",
        "extra.gossip.gossiper": "PushPull, PushSum",
        "extra.gossip.graphs": "DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph, "
        "DynamicDirectedExponentialGraph, DynamicDirectedLinearGraph, GraphManager, "
        "NPeerDynamicDirectedExponentialGraph, RingGraph",
        "extra.gossip.messages": "communicate",
        "extra.gossip.mixing": "MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.distributed": {
        "experimental.nn.data_parallel.gossip.utils.cuda_metering": "EventRecorder, create_event_recorder",
        "experimental.nn.data_parallel.gossip.utils.helpers": "create_process_group, make_logger",
        "extra.gossip.gossiper": "Gossiper, PushPull, PushSum",
        "extra.gossip.graphs": "NPeerDynamicDirectedExponentialGraph as NPDDEGraph",
        "extra.gossip.messages": "communicate, flatten_tensors, group_by_dtype, unflatten_tensors",
        "extra.gossip.mixing": "UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.gossiper": {
        "extra.gossip.gossiper": "Gossiper, PushPull, PushSum",
        "extra.gossip.graphs": "GraphManager",
        "extra.gossip.mixing": "MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.graph_manager": {
        "extra.gossip.graphs": "DynamicBipartiteExponentialGraph, DynamicBipartiteLinearGraph, "
        "DynamicDirectedExponentialGraph, DynamicDirectedLinearGraph, Edge, GraphManager, "
        "NPeerDynamicDirectedExponentialGraph, RingGraph",
    },
    "experimental.nn.data_parallel.gossip.mixing_manager": {
        "extra.gossip.graphs": "GraphManager",
        "extra.gossip.mixing": "MixingManager, UniformMixing",
    },
    "experimental.nn.data_parallel.gossip.utils": {
        "experimental.nn.data_parallel.gossip.utils.helpers": "MultiProcessAdapter, create_process_group, make_logger",
        "extra.gossip.messages": "communicate, flatten_tensors, group_by_dtype, unflatten_tensors",
    },
    "experimental.nn.data_parallel.gossip.utils.helpers": {
        "extra.gossip.messages": "communicate, flatten_tensors, group_by_dtype, unflatten_tensors",
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
        "extra.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "extra.streams": "as_cuda, current_stream, is_cuda, use_device, use_stream",
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
    "experimental.nn.mevo": {
        "extra.vocab_output": "BackwardTrigger, BackwardTriggerFn, BaselineSoftmax, BaselineSoftmaxNllLoss, "
        "MemoryEfficientVocabOutput, lmcl_matmul",
    },
    "experimental.nn.offload": {
        "extra.offload": "ModelShard, OffloadFunction, OffloadModel, ShardSyncLayer, split_layers as _split",
    },
    "experimental.nn.sync_batchnorm": {
        "activations": "is_checkpointing, is_recomputing",
        "extra.batch_norm": "SyncBatchNorm",
        "internal.version": "torch_version",
    },
    "experimental.optim.dynamic_loss_scaler": {"extra.dynamic_loss_scaler": "DynamicLossScaler, OptState"},
    "experimental.tooling.layer_memory_tracker": {
        "extra.memory_tracker": "LayerMemoryTrace, LayerwiseMemoryTracker, LayerwiseMemoryTrackerSummary, "
        "ProcessGroupTracker, ProcessGroupTrackingEvent, SuggestedCheckpoints, TraceBackwardEvent, TraceForwardEvent, "
        "compare_memory_traces_in_plot, find_best_reset_points, matplotlib_figure_to_image, "
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
    "experimental.wgit.sha1_store": {"experimental.wgit.utils": "ExitCode", "internal.containers": "from_np, to_np"},
    "experimental.wgit.signal_sparsity": {"experimental.wgit.utils": "Algo"},
    "fair_dev.testing.testing": {
        "fair_dev.testing.models": "GPT2, DeviceAndTypeCheckModule, IdentityLayer",
        "fair_dev.testing.spawning": "dist_init, get_worker_map, get_world_sizes, make_cudnn_deterministic, rmf, "
        "teardown, temp_files_ctx, spawn_for_all_world_sizes, test_runner, "
        "torch_spawn, worker_process",
        "internal.version": "torch_version",
        "nn.model_parallel.initialize": "destroy_model_parallel, initialize_model_parallel",
    },
    "internal.containers": {
        "extra.containers": "apply_to_tensors, apply_to_type, from_np, pack_kwargs, split_non_tensors, to_np, "
        "unpack_kwargs, unpack_non_tensors",
    },
    "internal.object": {"extra.objects": "pyobject_to_tensor, tensor_to_pyobject"},
    "internal.parallel": {
        "extra.process_groups": "ProcessGroupName, chunk_and_pad, get_process_group_cached, validate_process_group",
    },
    "internal.params": {"extra.containers": "recursive_copy_to_device"},
    "internal.reduce_scatter_bucketer": {"extra.reduce_scatter_bucketer": "Bucket, ReduceScatterBucketer"},
    "nn.auto_wrap": {
        "nn.wrap.auto_wrap": "ConfigAutoWrap, default_auto_wrap_policy, enable_wrap",
        "wrapping.context": "auto_wrap, wrap",
        "wrapping.policies": "config_auto_wrap_policy",
    },
    "nn.checkpoint.checkpoint_activations": {
        "activations": "CheckpointFunction, ThreadLocalCheckpointingState, disable_checkpointing, "
        "enable_checkpointing, enable_recomputing, is_checkpointing, is_recomputing, patch_batchnorm, thread_local",
        "extra.containers": "pack_kwargs, split_non_tensors, unpack_kwargs, unpack_non_tensors",
    },
    "nn.checkpoint.checkpoint_utils": {"activations": "patch_batchnorm"},
    "nn.data_parallel.fsdp_optim_utils": {"flattening.wrapper": "FlattenParamsWrapper"},
    "nn.data_parallel.fully_sharded_data_parallel": {
        "extra.containers": "apply_to_tensors, recursive_copy_to_device",
        "extra.process_groups": "chunk_and_pad, validate_process_group",
        "extra.reduce_scatter_bucketer": "ReduceScatterBucketer",
        "extra.tensors": "alloc_storage_, cast_floats_to_right_precision, free_storage_",
        "flattening.keys": "no_key_translation as no_pre_load_state_dict_hook",
        "flattening.wrapper": "FlattenParamsWrapper",
        "internal.parallel": "enable_pytorch_sync_bn",
        "internal.params": "calc_grad_norm",
        "internal.reduce_scatter_bucketer": "enable_nccl_base_collectives",
        "internal.state_dict": "replace_by_prefix_",
        "nn.data_parallel": "fsdp_optim_utils as ou",
        "nn.data_parallel.fsdp_facts": "TrainingState",
    },
    "nn.data_parallel.sharded_ddp": {
        "flattening.bucket": "GradBucket",
        "internal.params": "Workhandle, get_global_rank",
    },
    "nn.misc.checkpoint_activations": {
        "activations": "CheckpointFunction, disable_checkpointing, enable_checkpointing, "
        "enable_recomputing, is_checkpointing, is_recomputing, patch_batchnorm",
        "nn.checkpoint.checkpoint_activations": "checkpoint_wrapper",
    },
    "nn.misc.flatten_params_wrapper": {
        "flattening.flat_parameter": "FlatParameter, ParamGroups",
        "flattening.wrapper": "FlattenParamsWrapper",
        "internal.state_dict": "replace_by_prefix_",
    },
    "nn.misc.param_bucket": {"flattening.bucket": "Bucket, GradBucket, ParamBucket"},
    "nn.moe.moe_layer": {"moe": "AllToAll as _AllToAll"},
    "nn.moe.top2gate": {"moe": "Top2Gate, gumbel_rsample, one_hot, top2gating"},
    "nn.model_parallel.layers": {
        "model_parallel.layers": "initialize_affine_weight as _initialize_affine_weight",
        "nn.model_parallel.initialize": "get_model_parallel_rank, get_model_parallel_world_size",
        "nn.model_parallel.mappings": "copy_to_model_parallel_region, gather_from_model_parallel_region, "
        "reduce_from_model_parallel_region, scatter_to_model_parallel_region",
        "nn.model_parallel.utils": "VocabUtility, divide_and_check_no_remainder",
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
    "nn.pipe.balance.blockpartition": {"pipeline.balance": "solve"},
    "nn.pipe.balance.profile": {
        "nn.pipe.types": "Tensors",
        "pipeline.balance": "layerwise_sandbox, profile_sizes, profile_times",
        "pipeline.microbatch": "Value as TensorOrTensors",
    },
    "nn.pipe.batchnorm": {
        "activations": "is_recomputing",
        "pipeline.batch_norm": "DeferredBatchNorm, TModule",
    },
    "nn.pipe.checkpoint": {
        "activations": "ThreadLocalCheckpointingState as ThreadLocal, enable_checkpointing, "
        "enable_recomputing, is_checkpointing, is_recomputing, thread_local",
        "extra.dependency": "fork, get_phony, join",
        "nn.pipe.types": "Tensors",
    },
    "nn.pipe.copy": {
        "extra.streams": "current_stream, get_device, record_stream, use_stream, wait_stream",
        "nn.pipe.types": "Tensors",
    },
    "nn.pipe.dependency": {"extra.dependency": "Fork, Join, fork, get_phony, join"},
    "nn.pipe.messages": {
        "internal.object": "pyobject_to_tensor, tensor_to_pyobject",
        "nn.model_parallel.initialize": "get_pipeline_parallel_group",
        "nn.pipe.types": "PipeMessage",
    },
    "nn.pipe.microbatch": {"nn.pipe.types": "Tensors", "pipeline.microbatch": "check"},
    "nn.pipe.phony": {"extra.dependency": "get_phony", "extra.streams": "default_stream, use_stream"},
    "nn.pipe.pipe": {
        "internal.version": "torch_version",
        "nn.pipe": "microbatch",
        "nn.pipe.pipeline": "Pipeline",
        "pipeline.skip": "inspect_skip_layout, verify_skippables",
        "extra.streams": "new_stream",
        "nn.pipe.types": "Tensors",
        "pipeline.batch_norm": "DeferredBatchNorm",
        "pipeline.partition": "BalanceError, verify_module",
        "pipeline.microbatch": "Value as TensorOrTensors",
        "pipeline.pipe": "MOVING_DENIED, Pipe",
    },
    "nn.pipe.pipeline": {
        "nn.pipe.checkpoint": "Checkpointing",
        "nn.pipe.copy": "Copy, Wait",
        "extra.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.tracker": "SkipTrackerThroughPotals, use_skip_tracker",
        "extra.streams": "current_stream, use_device",
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
    "nn.pipe.skip.layout": {
        "pipeline.skip": "SkipLayout, inspect_skip_layout, Namespace",
    },
    "nn.pipe.skip.namespace": {"pipeline.skip": "Namespace"},
    "nn.pipe.skip.portal": {
        "nn.pipe.copy": "Context as CopyContext, Copy",
        "extra.dependency": "get_phony",
        "nn.pipe.skip.namespace": "Namespace",
        "extra.streams": "get_device",
    },
    "nn.pipe.skip.skippable": {
        "nn.pipe.microbatch": "Batch",
        "nn.pipe.skip.tracker": "current_skip_tracker",
        "nn.pipe.types": "Tensors",
        "pipeline.skip": "Namespace, pop, skippable, stash, verify_skippables",
    },
    "nn.pipe.skip.tracker": {
        "nn.pipe.checkpoint": "is_checkpointing",
        "extra.dependency": "fork, join",
        "nn.pipe.microbatch": "Batch",
        "pipeline.skip": "SkipLayout",
        "nn.pipe.skip.namespace": "Namespace",
        "nn.pipe.skip.portal": "Portal",
    },
    "nn.pipe.stream": {
        "extra.streams": "AbstractStream, CPUStream, CPUStreamType, as_cuda, current_stream, default_stream, "
        "get_device, is_cuda, new_stream, record_stream, use_device, use_stream, wait_stream",
    },
    "nn.pipe.types": {"pipeline.async_pipe": "LazyModule", "pipeline.microbatch": "Value as TensorOrTensors"},
    "nn.pipe.worker": {"nn.pipe.microbatch": "Batch", "nn.pipe.stream": "use_device, use_stream"},
    "optim.adam": {"extra.adam": "Adam, Precision"},
    "optim.layerwise_gradient_scaler": {
        "extra.layerwise_gradient_scaler": "GradientHelper, LayerInfo, LayerwiseGradientScaler",
    },
    "optim.oss": {
        "extra.containers": "recursive_copy_to_device",
        "flattening.bucket": "ParamBucket",
        "internal.params": "calc_grad_norm",
    },
    "optim.utils": {"internal.params": "Workhandle, calc_grad_norm, get_global_rank"},
    "training_checkpoints.handles": {"checkpoint.background": "Handle"},
    "training_checkpoints.rank_states": {"checkpoint.rank_states": "TakesRankStates"},
    "utils.containers": {
        "extra.containers": "apply_to_tensors, apply_to_type, from_np, pack_kwargs, split_non_tensors, to_np, "
        "unpack_kwargs, unpack_non_tensors",
    },
    "utils.object": {"extra.objects": "pyobject_to_tensor, tensor_to_pyobject"},
    "utils.parallel": {
        "extra.process_groups": "ProcessGroupName, chunk_and_pad, get_process_group_cached, validate_process_group",
        "internal.parallel": "enable_pytorch_sync_bn",
    },
    "utils.params": {
        "extra.containers": "recursive_copy_to_device",
        "internal.params": "Workhandle, calc_grad_norm, get_global_rank",
    },
    "utils.reduce_scatter_bucketer": {
        "extra.reduce_scatter_bucketer": "Bucket, ReduceScatterBucketer",
        "internal.reduce_scatter_bucketer": "enable_nccl_base_collectives",
    },
    "utils.state_dict": {"internal.state_dict": "find_module_instances, replace_by_prefix_"},
    "utils.version": {"internal.version": "torch_version"},
}
