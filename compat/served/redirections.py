"""The names of fairscale that serve no purpose on today's torch, and what to take in place of each: one table.

:mod:`.redirected` serves it. A module of fairscale's that has no file in ``compat/`` is made of its entries
here; one that has a file takes its own entries from here.
"""

from __future__ import annotations

from typing import NamedTuple


class Redirection(NamedTuple):
    """Names of one module with one remedy.

    Attributes:
        names: separated by spaces; those of functions end in "()", all others are classes (types and constants too).
        instead: what to take, as users would write it.
        why: the reason in half a sentence, without a full stop.
    """

    names: str
    instead: str
    why: str


_AMPNET = (
    "torch.distributed.pipelining.Schedule1F1B",
    "stages step their optimizers with weights of different ages, which trains another model than the one given",
)
_RPC_STAGES = (
    "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
)
_STAGES_SEND = (
    "shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
    "stages send over their process group",
)
_SKIPS = ("shardkit.nn.pipe.skip.skippable", "skip tensors are arguments and results that autograd sees")

# Path of the module below fairscale -> its names.
REDIRECTED: dict[str, tuple[Redirection, ...]] = {
    "experimental.nn.ampnet_pipe.ampnet": (
        Redirection("AsyncAMPnetEventLoop create_task_without_skip_trackers()", *_AMPNET),
    ),
    "experimental.nn.ampnet_pipe.pipe": (Redirection("AMPnetPipe", *_AMPNET),),
    "experimental.nn.data_parallel.gossip.utils.cuda_metering": (
        Redirection(
            "CudaEventRecorder create_and_record_event()",
            "torch.profiler.profile",
            "it times phases on any device, without extra code",
        ),
    ),
    "experimental.nn.distributed_pipeline.data": (Redirection("DataConsumer ConsumerType", *_RPC_STAGES),),
    "experimental.nn.distributed_pipeline.graph": (
        Redirection(
            "DataSource MultiInputSequential Node PipelineModulesGraph NodeDataConsumer RemoteSequential()",
            *_RPC_STAGES,
        ),
    ),
    "experimental.nn.distributed_pipeline.loss": (Redirection("DistributedLoss()", *_RPC_STAGES),),
    "experimental.nn.distributed_pipeline.partition_handler": (
        Redirection("DistributedPipelineRecord PartitionHandler ExcInfo", *_RPC_STAGES),
    ),
    "experimental.nn.distributed_pipeline.pipeline": (
        Redirection("DistributedPipeline Device MOVING_DENIED check_pytorch_version()", *_RPC_STAGES),
    ),
    "experimental.nn.distributed_pipeline.trace": (
        Redirection("GraphCreator RemoteModuleTracer make_graph()", *_RPC_STAGES),
    ),
    "experimental.nn.mevo": (
        Redirection(
            "GetMaxFunction GetSumFunction TargetScoreFunction",
            "shardkit.model_parallel.vocab_loss.linear_cross_entropy",
            "a step inside of MemoryEfficientVocabOutput, which is one autograd function now",
        ),
    ),
    "experimental.nn.ssd_offload": (
        Redirection(
            "SsdBuffer SsdFlatParameter SsdParameter SsdTensorHandle",
            "FullyShardedDataParallel(move_params_to_cpu=True)",
            "fairscale dropped keeping parameters on disks in 0.4.11",
        ),
    ),
    "experimental.wgit.cli": (
        Redirection(
            "main()",
            "the commands of DVC or git-lfs",
            "an unfinished experiment; tools made for it version large files",
        ),
    ),
    "experimental.wgit.pygit": (Redirection("PyGit", "pygit2 or git itself", "a thin layer over pygit2"),),
    "experimental.wgit.repo": (
        Redirection(
            "Repo SizeInfo",
            "DVC or git-lfs, with weights in safetensors",
            "an unfinished experiment (needs pygit2 and pgzip); tools made for it version large files",
        ),
    ),
    "experimental.wgit.sha1_store": (
        Redirection(
            "SHA1_Store",
            "DVC or git-lfs, with weights in safetensors",
            "an unfinished experiment; tools made for it store large files by their hash",
        ),
    ),
    "experimental.wgit.signal_sparsity": (
        Redirection(
            "SignalSparsity random_sparse_mask()",
            "torch.ao.pruning or torchao.sparsity (masks), torch.topk of torch.fft (signals)",
            "part of wgit's unfinished lossy compression",
        ),
    ),
    "experimental.wgit.signal_sparsity_profiling": (
        Redirection(
            "EnergyConcentrationProfile",
            "torch.topk of torch.fft, and a cumulative sum",
            "part of wgit's unfinished lossy compression",
        ),
    ),
    "fair_dev.testing.testing": (
        Redirection("get_cycles_per_ms()", "torch.cuda._sleep", "it measures CUDA's busy-wait kernel"),
        Redirection(
            "SGDWithPausingCompute", "torch.optim.SGD with a step hook", "it tests fairscale's streams"
        ),
        Redirection(
            "get_smi_memory()", "torch.accelerator.memory_allocated()", "torch tells what nvidia-smi tells"
        ),
        Redirection("torch_cuda_version()", "torch.version.cuda", "it knows CUDA 10 and 11 only"),
    ),
    "nn.data_parallel.fsdp_optim_utils": (
        Redirection(
            "build_unflat_state_dict()",
            "FullyShardedDataParallel.gather_full_optim_state_dict(optimizer)",
            "it was a step within FSDP's methods, which need no helper for it now",
        ),
        Redirection(
            "flatten_optim_state_dict()",
            "FullyShardedDataParallel.get_shard_from_optim_state_dict(full_state)",
            "it was a step within FSDP's methods, which need no helper for it now",
        ),
    ),
    "nn.data_parallel.fully_sharded_data_parallel": (
        Redirection(
            "OffloadConfig",
            "FullyShardedDataParallel(move_params_to_cpu=True)",
            "fairscale itself dropped it in 0.4.11",
        ),
    ),
    "nn.model_parallel.random": (
        Redirection(
            "CheckpointFunction",
            "shardkit.model_parallel.checkpoint",
            "one autograd function runs a checkpointed call again and puts its random state back",
        ),
    ),
    "nn.pipe.async_pipe": (
        Redirection("PartitionInfo", "shardkit.nn.pipe.AsyncPipe", "a rank holds one run of layers"),
    ),
    "nn.pipe.async_pipeline": (
        Redirection(
            "AsyncPipeline",
            "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
            "it is a part of AsyncPipe",
        ),
    ),
    "nn.pipe.async_schedule": (
        Redirection(
            "AsyncEventLoop AsyncMessageBody AsyncMessageType AsyncRecvOperator "
            "AutogradWithoutActivations Invocation Location ModuleWrapper TailBackwardContext "
            "Activations Invocations create_task()",
            "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
            "a stage sends and receives in a fixed order, without an event loop",
        ),
    ),
    "nn.pipe.checkpoint": (
        Redirection(
            "Checkpoint Recompute Context RNGStates Recomputed save_rng_states() restore_rng_states()",
            "shardkit.nn.checkpoint.checkpoint_wrapper or torch.utils.checkpoint",
            "one autograd function runs a checkpointed call again and puts its random state back",
        ),
    ),
    "nn.pipe.copy": (
        Redirection(
            "Context Copy Wait",
            "torch.Tensor.to(device, non_blocking=True)",
            "torch orders copies between devices, in backward too",
        ),
    ),
    "nn.pipe.messages": (
        Redirection(
            "RpcTransport SendRecvTransport Transport MESSAGE_TENSOR_SIZE MessageQueues "
            "MakeTransport() rpc_push_queue() to_input_device()",
            *_STAGES_SEND,
        ),
    ),
    "nn.pipe.pipeline": (
        Redirection(
            "Pipeline ExcInfo copy() depend() wait()",
            "shardkit.nn.pipe.Pipe",
            "fences and streams have no place in it any more",
        ),
    ),
    "nn.pipe.rpc": (
        Redirection(
            "PipeBackRedirect DEFAULT_MAX_SOURCE_POSITIONS DEFAULT_MAX_TARGET_POSITIONS DtypeOrDtypes "
            "SizeOrSizes callback_with_model() get_dtype() get_shapes() set_device_based_on_group()",
            "shardkit.nn.pipe.PipeRPCWrapper",
            "it is a part of it",
        ),
        Redirection(
            "get_global_ranks_from_group()", "torch.distributed.get_process_group_ranks", "torch has it"
        ),
    ),
    "nn.pipe.skip.portal": (Redirection("Context Portal PortalBlue PortalCopy PortalOrange", *_SKIPS),),
    "nn.pipe.skip.tracker": (
        Redirection(
            "SkipTracker SkipTrackerThroughPotals ThreadLocal thread_local current_skip_tracker() "
            "use_skip_tracker()",
            *_SKIPS,
        ),
    ),
    "nn.pipe.types": (
        Redirection(
            "PipeMessage ACTIVATIONS_GRADS_QUEUE EVENT_LOOP_ACTIVATIONS_QUEUE "
            "EVENT_LOOP_GRADIENTS_QUEUE EVENT_LOOP_QUEUE MESSAGE_GENERATION_START MessageGeneration "
            "PORTAL_QUEUE SKIP_TENSOR_QUEUE",
            *_STAGES_SEND,
        ),
    ),
    "nn.pipe.worker": (
        Redirection(
            "Task ExcInfo create_workers() join_workers() spawn_workers() worker()",
            "shardkit.nn.pipe.Pipe",
            "one thread issues the cells of all devices, which do not wait for each other",
        ),
    ),
}
