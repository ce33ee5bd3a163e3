"""The ranks whose gradients are averaged, and what the averages amount to.

Legend: G param groups of an optimizer; N ranks; P elements of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for
from ..checks.same_everywhere import check_same_everywhere
from ..errors import ConfigurationError
from ..optimizers.shards import shard_behind
from ..oss.optimizer import OSS
from ..types import ProcessGroup
from .errors import AdaScaleArgumentError
from .gradient_noise import squared_norm


class Averaging:
    """Over which ranks an optimizer's gradients are averaged.

    Args:
        optimizer: whose gradients.
        world_size: number of ranks; None for the group's, 1 without one.
        group: ranks; None for those of an OSS, else all.
        backend: as :class:`~shardkit.AdaScale`.

    Raises:
        AdaScaleArgumentError: the group has another number of ranks.
        ConfigurationError: the parameters are FSDP's.
    """

    def __init__(
        self, optimizer: Optimizer, world_size: int | None, group: ProcessGroup, backend: str | Backend | None
    ) -> None:
        self._optimizer, self._given, self._backend = optimizer, group, backend
        self.note_parameters()
        self.world_size = self._find_world_size(world_size)

    def parameters(self) -> list[nn.Parameter]:
        """Those of all groups."""
        return [p for g in self._optimizer.param_groups for p in g["params"]]

    def note_parameters(self) -> None:
        """After a change of the groups; whether they are the same on all ranks is compared before the next sum."""
        self._compared = False
        self._flats = {p: flat for p in self.parameters() if (flat := shard_behind(p)) is not None}
        if any(not flat.group.backend.has_storage for flat in self._flats.values()):
            raise ConfigurationError(
                "AdaScale needs the gradients that each rank computes, and FSDP's parameters have none of their own "
                "where a compiler decides on memory. Use OSS with ShardedDDP there"
            )

    def measured(self) -> list[list[nn.Parameter]]:
        """The parameters that get this rank's own gradients, by group: for FSDP's shards those that lie in them."""
        return [[m for p in g["params"] for m in self._behind(p)] for g in self._optimizer.param_groups]

    def _behind(self, param: nn.Parameter) -> list[nn.Parameter]:
        flat = self._flats.get(param)
        return [param] if flat is None else [original.param for original in flat.originals]

    def _find_world_size(self, given: int | None) -> int:
        group = self._find_group()
        if given is None:
            return 1 if group is None else group.world_size
        if given > 1 and group is not None and group.world_size != given:
            raise AdaScaleArgumentError(
                f"world_size is {given}, but gradients would be compared over a group of {group.world_size} ranks; "
                "pass the group that averages them: shardkit.AdaScale(optimizer, group=...)"
            )
        return given

    def _find_group(self) -> Group | None:
        if isinstance(self._optimizer, OSS) and self._given is None:
            return self._optimizer._group
        try:
            group = backend_for(self.parameters(), self._backend).group(self._given)
            sizes = {flat.group.world_size for flat in self._flats.values()}
            if self._given is None and sizes - {group.world_size}:
                raise AdaScaleArgumentError(
                    f"parameters are sharded over {min(sizes)} of {group.world_size} ranks; say which ranks average "
                    "their gradients, replicas included: shardkit.AdaScale(optimizer, group=...)"
                )
            return group
        except ConfigurationError:
            if self._given is not None or (dist.is_available() and dist.is_initialized()):
                raise
            return None

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up small tensors in place (collective, unless there is one rank)."""
        if self.world_size == 1:
            return values
        group = self._find_group()
        if group is None:
            raise ConfigurationError(
                f"world_size is {self.world_size}, but there is no process group; call "
                "torch.distributed.init_process_group(...) before backward"
            )
        if not self._compared:
            facts = [
                (f"parameter {i} of group {g}", ([tuple(m.shape) for m in self._behind(p)], str(p.dtype)))
                for g, options in enumerate(self._optimizer.param_groups)
                for i, p in enumerate(options["params"])
            ]
            check_same_everywhere(group, facts, "AdaScale's parameters (put AdaScale around OSS, not inside)")
            self._compared = True
        group.channel("control").all_reduce(values, label="AdaScale: squared norms")
        return values

    def share_of_total(self, like: torch.Tensor) -> torch.Tensor:
        """What adds up over the ranks to |ḡ|², by group [G], with the dtype and device of ``like``."""
        inner, copies = self._optimizer, self.world_size
        if isinstance(inner, OSS):
            inner.gradients()  # where these are parts of a flat segment, they are in their place from now on
            copies = copies if inner.runs_whole else 1  # each gradient counts at its owner
            inner = inner.optim
        return torch.stack([self._squares(group["params"], like) for group in inner.param_groups]) / copies

    def _squares(self, params: Sequence[nn.Parameter], like: torch.Tensor) -> torch.Tensor:
        """What adds up to Σ|p.grad|² times the number of ranks, where each rank has all of it or a shard."""
        cut: dict[int, list[nn.Parameter]] = {}
        for p in params:
            cut.setdefault(self._flats[p].group.world_size if p in self._flats else 1, []).append(p)
        parts = [squared_norm(_gradients(held), like) * ranks for ranks, held in cut.items()]
        return torch.stack(parts).sum() if parts else torch.zeros_like(like)

    def divide_gradients(self, by: int) -> None:
        """Divides all gradients in place."""
        gradients = {id(g): g for g in _gradients(self.parameters())}
        if isinstance(self._optimizer, OSS):
            gradients |= {id(g): g for g in self._optimizer.gradients()}
        for gradient in gradients.values():
            gradient.div_(by)

    def flat_gradient(self, like: torch.Tensor) -> torch.Tensor:
        """All gradients in one tensor [P] with the dtype and device of ``like``; zeros where there is none."""
        flat = [
            (torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad)
            .reshape(-1)
            .to(like)
            for p in self.parameters()
        ]
        return torch.cat(flat)

    def correlation(self, like: torch.Tensor) -> torch.Tensor:
        """Mean correlation of the gradients that pairs of ranks hold now, 0-dim (collective)."""
        group = self._find_group()
        if group is None or self.world_size == 1:
            raise ConfigurationError("a correlation of ranks' gradients needs several ranks")
        own = self.flat_gradient(like)
        everybody = own.new_empty(self.world_size, own.numel())
        group.channel("control").all_gather_into(everybody.view(-1), own, label="AdaScale: correlation")
        correlation = torch.corrcoef(everybody)  # [N, N]
        above = torch.ones_like(correlation, dtype=torch.bool).triu(1)
        return correlation[above].mean()


def _gradients(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in params if p.grad is not None]
