"""The names of fairscale that serve no purpose on today's torch, and what to take in place of each: one table.

:mod:`.redirected` serves it. A module of fairscale's that has no file in ``compat/`` is made of its entries
here; one that has a file takes its own entries from here.
"""

from __future__ import annotations

from typing import NamedTuple


class Redirection(NamedTuple):
    """Names with one remedy.

    Attributes:
        names: ``module: name name; module: name``, modules below fairscale; those of functions end in "()", all others
            are classes (types and constants too).
        instead: what to take, as users would write it.
        why: the reason in half a sentence, without a full stop.
    """

    names: str
    instead: str
    why: str

    def of(self, module: str) -> list[str]:
        """Lists the names of a module."""
        return dict(part.split(": ") for part in self.names.split("; ")).get(module, "").split()


REDIRECTED = [
    Redirection(
        "experimental.nn.ampnet_pipe.ampnet: AsyncAMPnetEventLoop create_task_without_skip_trackers(); "
        "experimental.nn.ampnet_pipe.pipe: AMPnetPipe",
        "torch.distributed.pipelining.Schedule1F1B",
        "stages step their optimizers with weights of different ages, which trains another model than the "
        "one given",
    ),
    Redirection(
        "experimental.nn.data_parallel.gossip.cuda_metering: CudaEventRecorder DummyCudaEventRecorder EventRecorder "
        "MAX_LEN_DEQUEUE deque_with_max_len_fixed create_and_record_event() create_event_recorder()",
        "torch.profiler.profile",
        "it times phases on any device, without extra code",
    ),
    Redirection(
        "experimental.nn.distributed_pipeline.data: DataConsumer ConsumerType; "
        "experimental.nn.distributed_pipeline.graph: DataSource MultiInputSequential Node "
        "PipelineModulesGraph NodeDataConsumer RemoteSequential(); "
        "experimental.nn.distributed_pipeline.loss: DistributedLoss(); "
        "experimental.nn.distributed_pipeline.partition_handler: DistributedPipelineRecord PartitionHandler "
        "ExcInfo; experimental.nn.distributed_pipeline.pipeline: DistributedPipeline Device MOVING_DENIED "
        "check_pytorch_version(); experimental.nn.distributed_pipeline.trace: GraphCreator "
        "RemoteModuleTracer make_graph()",
        "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
        "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
    ),
    Redirection(
        "experimental.nn: GetMaxFunction GetSumFunction TargetScoreFunction",
        "shardkit.model_parallel.vocab_loss.linear_cross_entropy",
        "a step inside of MemoryEfficientVocabOutput, which is one autograd function now",
    ),
    Redirection(
        "experimental.nn.ssd_offload: SsdBuffer SsdFlatParameter SsdParameter SsdTensorHandle",
        "FullyShardedDataParallel(move_params_to_cpu=True)",
        "fairscale dropped keeping parameters on disks in 0.4.11",
    ),
    Redirection(
        "experimental.wgit.cli: main()",
        "the commands of DVC or git-lfs",
        "an unfinished experiment; tools made for it version large files",
    ),
    Redirection("experimental.wgit.pygit: PyGit", "pygit2 or git itself", "a thin layer over pygit2"),
    Redirection(
        "experimental.wgit.repo: Repo SizeInfo",
        "DVC or git-lfs, with weights in safetensors",
        "an unfinished experiment (needs pygit2 and pgzip); tools made for it version large files",
    ),
    Redirection(
        "experimental.wgit.sha1_store: SHA1_Store",
        "DVC or git-lfs, with weights in safetensors",
        "an unfinished experiment; tools made for it store large files by their hash",
    ),
    Redirection(
        "experimental.wgit.signal_sparsity: SignalSparsity random_sparse_mask()",
        "torch.ao.pruning or torchao.sparsity (masks), torch.topk of torch.fft (signals)",
        "part of wgit's unfinished lossy compression",
    ),
    Redirection(
        "experimental.wgit.signal_sparsity_profiling: EnergyConcentrationProfile",
        "torch.topk of torch.fft, and a cumulative sum",
        "part of wgit's unfinished lossy compression",
    ),
    Redirection(
        "fair_dev.testing.testing: get_cycles_per_ms()",
        "torch.cuda._sleep",
        "it measures CUDA's busy-wait kernel",
    ),
    Redirection(
        "fair_dev.testing.testing: SGDWithPausingCompute",
        "torch.optim.SGD with a step hook",
        "it tests fairscale's streams",
    ),
    Redirection(
        "fair_dev.testing.testing: get_smi_memory()",
        "torch.accelerator.memory_allocated()",
        "torch tells what nvidia-smi tells",
    ),
    Redirection(
        "fair_dev.testing.testing: torch_cuda_version()", "torch.version.cuda", "it knows CUDA 10 and 11 only"
    ),
    Redirection(
        "nn.data_parallel.fsdp_optim_utils: build_unflat_state_dict()",
        "FullyShardedDataParallel.gather_full_optim_state_dict(optimizer)",
        "it was a step within FSDP's methods, which need no helper for it now",
    ),
    Redirection(
        "nn.data_parallel.fsdp_optim_utils: flatten_optim_state_dict()",
        "FullyShardedDataParallel.get_shard_from_optim_state_dict(full_state)",
        "it was a step within FSDP's methods, which need no helper for it now",
    ),
    Redirection(
        "nn.data_parallel: OffloadConfig",
        "FullyShardedDataParallel(move_params_to_cpu=True)",
        "fairscale itself dropped it in 0.4.11",
    ),
    Redirection(
        "nn.model_parallel.random: CheckpointFunction",
        "shardkit.model_parallel.checkpoint",
        "one autograd function runs a checkpointed call again and puts its random state back",
    ),
    Redirection(
        "nn.pipe.async_pipe: PartitionInfo", "shardkit.nn.pipe.AsyncPipe", "a rank holds one run of layers"
    ),
    Redirection(
        "nn.pipe.async_pipeline: AsyncPipeline",
        "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
        "it is a part of AsyncPipe",
    ),
    Redirection(
        "nn.pipe.async_schedule: AsyncEventLoop AsyncMessageBody AsyncMessageType AsyncRecvOperator "
        "AutogradWithoutActivations Invocation Location ModuleWrapper TailBackwardContext Activations "
        "Invocations create_task()",
        "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
        "a stage sends and receives in a fixed order, without an event loop",
    ),
    Redirection(
        "nn.pipe.checkpoint: Checkpoint Recompute Context RNGStates Recomputed save_rng_states() "
        "restore_rng_states()",
        "shardkit.nn.checkpoint.checkpoint_wrapper or torch.utils.checkpoint",
        "one autograd function runs a checkpointed call again and puts its random state back",
    ),
    Redirection(
        "nn.pipe.copy: Context Copy Wait",
        "torch.Tensor.to(device, non_blocking=True)",
        "torch orders copies between devices, in backward too",
    ),
    Redirection(
        "nn.pipe.messages: RpcTransport SendRecvTransport Transport MESSAGE_TENSOR_SIZE MessageQueues "
        "MakeTransport() rpc_push_queue() to_input_device(); nn.pipe.types: PipeMessage "
        "ACTIVATIONS_GRADS_QUEUE EVENT_LOOP_ACTIVATIONS_QUEUE EVENT_LOOP_GRADIENTS_QUEUE EVENT_LOOP_QUEUE "
        "MESSAGE_GENERATION_START MessageGeneration PORTAL_QUEUE SKIP_TENSOR_QUEUE",
        "shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
        "stages send over their process group",
    ),
    Redirection(
        "nn.pipe.pipeline: Pipeline ExcInfo copy() depend() wait()",
        "shardkit.nn.pipe.Pipe",
        "fences and streams have no place in it any more",
    ),
    Redirection(
        "nn.pipe.rpc: PipeBackRedirect DEFAULT_MAX_SOURCE_POSITIONS DEFAULT_MAX_TARGET_POSITIONS "
        "DtypeOrDtypes SizeOrSizes callback_with_model() get_dtype() get_shapes() "
        "set_device_based_on_group()",
        "shardkit.nn.pipe.PipeRPCWrapper",
        "it is a part of it",
    ),
    Redirection(
        "nn.pipe.rpc: get_global_ranks_from_group()",
        "torch.distributed.get_process_group_ranks",
        "torch has it",
    ),
    Redirection(
        "nn.pipe.skip.portal: Context Portal PortalBlue PortalCopy PortalOrange; nn.pipe.skip.tracker: "
        "SkipTracker SkipTrackerThroughPotals ThreadLocal thread_local current_skip_tracker() "
        "use_skip_tracker()",
        "shardkit.nn.pipe.skip.skippable",
        "skip tensors are arguments and results that autograd sees",
    ),
    Redirection(
        "nn.pipe.worker: Task ExcInfo create_workers() join_workers() spawn_workers() worker()",
        "shardkit.nn.pipe.Pipe",
        "one thread issues the cells of all devices, which do not wait for each other",
    ),
]
REDIRECTED_MODULES = sorted({part.split(": ")[0] for entry in REDIRECTED for part in entry.names.split("; ")})
