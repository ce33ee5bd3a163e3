"""fairscale.experimental.nn.data_parallel.gossip.distributed: SlowMoDistributedDataParallel."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardkit.backend import Group, backend_for
from shardkit.errors import ConfigurationError
from shardkit.extra.slow_momentum import SlowMomentum, average_gradients, average_together
from shardkit.sharded_ddp.buffers import BufferSync, broadcast_module, broadcast_together
from shardkit.torch_seams.hooks import BackwardState, tensors_of, watch_outputs

from .gossiper import Gossiper, PushPull, PushSum
from .graph_manager import GraphManager
from .graph_manager import NPeerDynamicDirectedExponentialGraph as NPDDEGraph
from .mixing_manager import MixingManager, UniformMixing
from .utils.cuda_metering import EventRecorder, create_event_recorder
from .utils.helpers import (
    MultiProcessAdapter,
    communicate,
    create_process_group,
    flatten_tensors,
    group_by_dtype,
    make_logger,
    unflatten_tensors,
)

__all__ = [
    "EventRecorder",
    "Gossiper",
    "GraphManager",
    "MixingManager",
    "MultiProcessAdapter",
    "NPDDEGraph",
    "PushPull",
    "PushSum",
    "SlowMoBaseAlgorithm",
    "SlowMoDistributedDataParallel",
    "UniformMixing",
    "communicate",
    "create_event_recorder",
    "create_process_group",
    "flatten_tensors",
    "group_by_dtype",
    "make_logger",
    "unflatten_tensors",
]

HEARTBEAT_TIMEOUT = 300  # fairscale's; the group's own timeout counts here
BROADCAST_BUCKET_SIZE = 10 * 1024 * 1024


class SlowMoBaseAlgorithm(str, enum.Enum):
    """How nodes agree, more or less, between slow momentum steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"


class SlowMoDistributedDataParallel(nn.Module):
    """Data parallel training in which nodes step on their own and agree from time to time.

    After each ``optimizer.step()`` comes ``model.perform_slowmo(optimizer)``. The ranks of a node share gradients in
    every backward. LocalSGD averages nodes every ``localsgd_frequency`` steps; SGP (stochastic gradient push) averages
    with some peers in every step. Slow momentum is :class:`shardkit.extra.slow_momentum.SlowMomentum`.

    Where it departs from fairscale's:

    * Rank 0's parameters are taken at the start, and slow momentum starts from them. fairscale starts from what each
      rank has after its first step, and ranks never come together again without ``slowmo_memory_efficient``.
    * LocalSGD averages before every slow momentum step (fairscale: only where ``slowmo_frequency`` is a multiple of
      ``localsgd_frequency``, or with ``slowmo_memory_efficient``).
    * With ``fp32_params``, those are averaged, not the fp16 ones with a correction of their errors.
    * Weights of push-sum are 1 again after a full average.

    Args:
        module: the model.
        nprocs_per_node: how many ranks, next to each other, make a node.
        broadcast_buffers: take rank 0's buffers after training forwards.
        slowmo_base_algorithm: LOCALSGD or SGP.
        slowmo_momentum, slowmo_lr: β and α; with 0 and 1 there is no slow momentum.
        slowmo_memory_efficient: its state is sharded over ranks, and its step averages all of them.
        slowmo_frequency: steps from one slow momentum step to the next.
        slowmo_num_shards: over how many ranks at most the state is sharded.
        localsgd_frequency: steps from one average to the next.
        graph, mixing: (SGP) with whom to gossip, and how much; default: each step one peer, 1, 2, 4, ... nodes ahead.
        push_sum: (SGP) PushSum or PushPull, which are the same here.
        slowmo_sgp_average_params: (SGP) average all nodes before slow momentum.
        overlap, synch_freq, use_streams: refused or ignored; gossip does not overlap (neither does fairscale's).
        verbose: log at level DEBUG.
        profile_mode: refused; use torch.profiler.
        process_rank, process_world_size: must be those of the group, if given.
        global_group, master_group, local_node_group: all ranks, the first ranks of nodes, and the ranks of this node.
        comm_device: ignored: communication goes from where the parameters are.

    Raises:
        ConfigurationError: nodes of uneven size, options that don't fit.
    """

    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
        graph: GraphManager | None = None,
        mixing: MixingManager | None = None,
        push_sum: bool = True,
        overlap: bool = False,
        synch_freq: int = 0,
        use_streams: bool = True,
        slowmo_sgp_average_params: bool = False,
        verbose: bool = False,
        profile_mode: bool = False,
        process_rank: int | None = None,
        process_world_size: int | None = None,
        global_group: Any = None,
        master_group: Any = None,
        local_node_group: Any = None,
        comm_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if overlap or profile_mode:
            raise ConfigurationError(
                f"overlap={overlap}, profile_mode={profile_mode}: gossip does not overlap (fairscale refuses it as "
                "well), and torch.profiler shows where time goes; leave both False"
            )
        self.module = module
        self.nprocs_per_node = nprocs_per_node
        self._make_groups(global_group, master_group, local_node_group)
        for given, real in ((process_rank, self.process_rank), (process_world_size, self.process_world_size)):
            if given is not None and given != real:
                raise ConfigurationError(
                    f"process_rank={process_rank}, process_world_size={process_world_size}; the group says "
                    f"{self.process_rank} of {self.process_world_size}"
                )
        self.logger: Any = logging.getLogger(__name__)
        if verbose:
            self.logger.setLevel(logging.DEBUG)
            self.logger = MultiProcessAdapter(self.logger, {"process_num": self.process_rank})
        broadcast_module(module, self._world)
        self.broadcast_buffers = broadcast_buffers
        self._buffers_sync = BufferSync(module, self._world, broadcast_buffers)
        self._backward = BackwardState(self._after_backward)

        algorithm = SlowMoBaseAlgorithm(slowmo_base_algorithm)
        several_nodes = self.logical_world_size > 1  # else the ranks of one node agree in every backward
        self.localsgd = several_nodes and algorithm is SlowMoBaseAlgorithm.LOCALSGD
        self.sgp = several_nodes and algorithm is SlowMoBaseAlgorithm.SGP
        self.localsgd_frequency = localsgd_frequency
        self.slowmo = slowmo_lr != 1 or slowmo_momentum != 0
        self.slowmo_lr, self.slowmo_momentum = slowmo_lr, slowmo_momentum
        self.slowmo_frequency = slowmo_frequency
        self.slowmo_memory_efficient = slowmo_memory_efficient
        self.slowmo_num_shards = (
            min(self.process_world_size, slowmo_num_shards) if slowmo_memory_efficient else 1
        )
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        self.num_updates = 0
        shards = self.slowmo_num_shards if slowmo_memory_efficient else 0
        self._slow_momentum = SlowMomentum(self._world, slowmo_momentum, slowmo_lr, shards)
        self._begin()
        if self.sgp:
            self._sgp_init(graph, mixing, push_sum)

    # -------------------------------------------------------------------------------------- groups
    def _make_groups(self, global_group: Any, master_group: Any, local_node_group: Any) -> None:
        """All ranks, the first ranks of nodes (None elsewhere), and this node's (None: it has one rank)."""
        backend = backend_for(self.module.parameters())
        self._world: Group = backend.group(global_group)
        world, n = self._world, self.nprocs_per_node
        self.process_rank, self.process_world_size = world.rank, world.world_size
        if n < 1 or world.world_size % n:
            raise ConfigurationError(
                f"nprocs_per_node is {n}; the {world.world_size} ranks must make whole nodes of that many"
            )
        self.local_rank, self.logical_rank = world.rank % n, world.rank // n
        self.logical_world_size = world.world_size // n
        self._masters: Group | None = world
        self._node: Group | None = None
        if n == 1:
            return
        if local_node_group is not None:
            self._node = backend.group(local_node_group)
        else:
            made = [world.new_group(range(i, i + n)) for i in range(0, world.world_size, n)]
            self._node = made[self.logical_rank]
        if master_group is None:
            self._masters = world.new_group(range(0, world.world_size, n))
        else:
            self._masters = backend.group(master_group) if self.local_rank == 0 else None

    def _begin(self) -> None:
        """Slow momentum starts from the parameters of now, kept on the host until the optimizer is known."""
        self._slow_momentum.started = False
        params = self.module.parameters() if self.slowmo else ()
        self._start = [p.detach().to("cpu", copy=True) for p in params]

    # -------------------------------------------------------------------------------------- training
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self.sgp:
            self._sgp_unbias()
        if self.training:
            self._buffers_sync.sync_if_changed()
            self._buffers_sync.changed = True
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and (self._node is not None or self.sgp):
            watch_outputs(tensors_of(outputs), self._backward.on_output)
        return outputs

    def _after_backward(self) -> None:
        if self._node is not None:
            average_gradients([p for p in self.module.parameters() if p.requires_grad], self._node)
        if self.sgp:
            self._sgp_ps_numerator()

    @torch.no_grad()
    def perform_slowmo(self, optimizer: torch.optim.Optimizer, fp32_params: Any = None) -> None:
        """To be called after each ``optimizer.step()``, on all ranks: averages and slow momentum, when they are due.

        Args:
            optimizer: whose parameters slow momentum is applied to.
            fp32_params: the parameters' fp32 copies where they are fp16: one vector, a list, or a dict of one of them.
        """
        copies = _copies(fp32_params)
        if self.slowmo and not self._slow_momentum.started:
            self._slow_momentum.start(optimizer, self._starting_values(copies))
            self._start = []
        if self.sgp:
            self._sgp_ps_numerator()
        step = self.num_updates + 1
        slow = self.slowmo and step % self.slowmo_frequency == 0
        averages_itself = slow and self.slowmo_memory_efficient
        local_sgd_is_due = self.localsgd and (slow or step % self.localsgd_frequency == 0)
        average = local_sgd_is_due or (self.sgp and slow and self.slowmo_sgp_average_params)
        tensors = copies or list(self.module.parameters())
        if not averages_itself and (average or self.sgp):
            if self._masters is not None and average:
                average_together(tensors, self._masters, "parameters")
            elif self._masters is not None:
                self._sgp_gossip(tensors, self._masters)
            if self._node is not None:
                broadcast_together(tensors, self._node, "parameters of the node's first rank")
        if slow:
            self._slow_momentum.step(optimizer)
        if self.sgp and (averages_itself or average):
            self.ps_weight.fill_(1)
        _copy_back(copies, list(self.module.parameters()))
        self.num_updates = step

    def _starting_values(self, copies: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """What parameters, or their copies, were at the beginning."""
        if len(copies) == 1 and len(self._start) > 1:
            return {copies[0]: torch.cat([t.reshape(-1) for t in self._start])}
        return dict(zip(copies or self.module.parameters(), self._start, strict=True))

    # -------------------------------------------------------------------------------------- stochastic gradient push
    def _sgp_init(self, graph: GraphManager | None, mixing: MixingManager | None, push_sum: bool) -> None:
        if self._world.backend.even_shards_only:
            raise ConfigurationError(
                f"gossip sends different things from rank to rank, which backend {self._world.backend.name!r} can't; "
                "use SlowMoBaseAlgorithm.LOCALSGD"
            )
        if graph is None:
            graph = NPDDEGraph(
                self.logical_rank, self.logical_world_size, self.nprocs_per_node, self.local_rank
            )
        param = next(self.module.parameters())
        mixing = mixing or UniformMixing(graph, param.device)
        self.ps_weight = torch.ones(
            1, device=param.device, dtype=torch.promote_types(param.dtype, torch.float32)
        )
        self.is_sgp_ps_numerator = False
        self._mixing, self._graph = mixing, graph
        self._regular = mixing.is_regular()
        self._gossiper_class: type[Gossiper] = PushSum if push_sum else PushPull
        biased = self.slowmo and not self.slowmo_memory_efficient and not self.slowmo_sgp_average_params
        if biased and not self._regular:
            raise ConfigurationError(
                "this mixing gives biased averages, which slow momentum can't be applied to; set "
                "slowmo_memory_efficient or slowmo_sgp_average_params"
            )

    def _sgp_gossip(self, tensors: list[torch.Tensor], nodes: Group) -> None:
        """One step of push-sum: keeps a share, sends the rest, adds what comes."""
        own = self._mixing.get_mixing_weights(residual_adjusted=False)["lo"].to(self.ps_weight)
        weight = self.ps_weight * own
        dtype = tensors[0].dtype
        if any(t.dtype is not dtype for t in tensors):
            raise ConfigurationError("SGP sends parameters as one vector; they must have one dtype")
        flat = flatten_tensors(tensors).mul_(own.to(dtype))
        gossiper = self._gossiper_class(flat, self._graph, mixing=self._mixing)
        gossiper.group = nodes
        received, received_weight = gossiper.mix(flat, weight.to(dtype))
        for tensor, new in zip(tensors, unflatten_tensors(flat.add_(received), tensors), strict=True):
            tensor.copy_(new)
        self.ps_weight.copy_(torch.ones_like(weight) if self._regular else weight + received_weight)

    @torch.no_grad()
    def _sgp_ps_numerator(self) -> None:
        """Parameters as push-sum mixes them and the optimizer changes them: times their weight."""
        if not self._regular and not self.is_sgp_ps_numerator:
            torch._foreach_mul_(list(self.module.parameters()), self.ps_weight.item())
            self.is_sgp_ps_numerator = True

    @torch.no_grad()
    def _sgp_unbias(self) -> None:
        """Parameters as the model uses them: divided by their weight."""
        if not self._regular and self.is_sgp_ps_numerator:
            torch._foreach_div_(list(self.module.parameters()), self.ps_weight.item())
            self.is_sgp_ps_numerator = False

    # -------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The module's, and for SGP the weight of push-sum; slow momentum is not in it."""
        state: dict[str, Any] = super().state_dict()
        if self.sgp:
            state["ps_weight"] = self.ps_weight.cpu()
            state["is_sgp_ps_numerator"] = self.is_sgp_ps_numerator
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Takes the state over; slow momentum begins anew from there. The argument is left alone."""
        state = dict(state_dict)
        if self.sgp:
            self.ps_weight.copy_(state.pop("ps_weight"))
            self.is_sgp_ps_numerator = bool(state.pop("is_sgp_ps_numerator"))
        super().load_state_dict(state)
        self._begin()


def _copies(fp32_params: Any) -> list[torch.Tensor]:
    if isinstance(fp32_params, dict):
        if len(fp32_params) != 1:
            raise ConfigurationError(f"fp32_params is a dict of {len(fp32_params)}; there must be one entry")
        (fp32_params,) = fp32_params.values()
    if fp32_params is None:
        return []
    return [fp32_params] if isinstance(fp32_params, torch.Tensor) else list(fp32_params)


def _copy_back(copies: list[torch.Tensor], params: list[nn.Parameter]) -> None:
    """Parameters become their fp32 copies."""
    if copies:
        flat = copies[0] if len(copies) == 1 else torch.cat([c.reshape(-1) for c in copies])
        for p, new in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.copy_(new.view(p.shape))
