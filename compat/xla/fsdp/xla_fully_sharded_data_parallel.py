"""torch_xla.distributed.fsdp.XlaFullyShardedDataParallel on shardkit's FSDP, on XLA and on other backends."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from shardkit.checkpoint.tools.rank_files import FLAT, PREFIX, in_state_dict, shard_name
from shardkit.errors import ConfigurationError
from shardkit.fsdp.flat_param import Registered
from shardkit.fsdp.state import INNER, OUTER, Options, clean
from shardkit.fsdp.state_dict import local_state, shared_across
from shardkit.fsdp.submodule_api import begin_loading_shards, collecting, end_loading_shards
from shardkit.layout import EachAlone, ShardLayout
from shardkit.nn.data_parallel import FullyShardedDataParallel, TrainingState
from shardkit.reduction.shard_gradients import Portion, clip_by_global_norm, norm_like
from shardkit.torch_fsdp.fully_sharded_data_parallel import materialize
from shardkit.torch_seams.tensors import move_buffers
from shardkit.torch_seams.wrappers import versions_of
from shardkit.types import StateDict, Tree
from shardkit.xla.ranks import current_backend, group_among

from .state_dict_utils import ShardMetadata
from .wrap import recursive_wrap

__all__ = ["TrainingState", "XlaFullyShardedDataParallel"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NOT_HANDED_ON = ("self", "module", "__class__", "auto_wrap_policy", "auto_wrapper_callable")
_SHOWN = ("optimization_barrier_in_forward", "optimization_barrier_in_backward", "coalesce_all_gather_ops")


class XlaFullyShardedDataParallel(FullyShardedDataParallel):
    """torch_xla's FSDP: see :class:`shardkit.FSDP` for what it does. Rank 0's initial values count.

    ``state_dict()`` is this rank's part of the model, under torch_xla's names and with its padding. Together with
    :meth:`get_shard_metadata` it makes a checkpoint that torch_xla's FSDP loads, and the other way round; optimizer
    states fit too. ``load_state_dict`` also takes full state dicts.

    Args:
        module: on any device; XLA ranks move it to theirs.
        reshard_after_forward: give gathered parameters back after forward.
        flatten_parameters: one flat parameter for each wrapper (two if some parameters are frozen).
        execute_sharding_on_init: run the recorded graph once the module is sharded.
        optimization_barrier_in_forward, optimization_barrier_in_backward: accepted; units are kept apart by the
            order of their collectives.
        sync_on_finalization: run the recorded graph at the end of each backward (of the root's option).
        disable_reshard_on_root: the outermost wrapper keeps its parameters until backward.
        compute_dtype: dtype of gathered parameters, inputs and gradients; shards keep the parameters' own.
        buffer_dtype: ``compute_dtype`` by default.
        fp32_reduce_scatter: reduce gradients in fp32.
        sharding_groups: partition of all ranks; parameters are sharded, and gradients averaged, within a part.
        sharding_rank, sharding_world_size: this rank's place in it; needed with ``sharding_groups``.
        shard_param_on_dim_0: without ``flatten_parameters``: shards are whole rows. State dicts hold them as rows;
            ``parameters()`` lists them as flat parameters, which is the same to element-wise optimizers.
        pin_layout_in_collective_ops, reduce_scatter_bucket_size_mb, coalesce_all_gather_ops: accepted; how a unit's
            tensors travel is the backend's business.
        auto_wrap_policy: wraps submodules first, see :mod:`shardkit.xla.fsdp.wrap`.
        auto_wrapper_callable: in place of this class for them.
        param_init_fn: initialises a module with parameters on the meta device; default: its ``reset_parameters()``.
        mark_step_on_finalization: older name of ``sync_on_finalization``.
        _shard_size_multiple: shards are padded to a multiple of so many elements.
        _use_xla_patched_linear, _debug_msg, _debug_print: accepted; no effect.

    Raises:
        ConfigurationError: wrapped already; no forward; ``sharding_groups`` without or against the place in it; a
            dtype that is no float; a ``_debug_dummy_...`` option, whose results would be wrong.
    """

    _shards: list[Shard]
    _listed_again: dict[str, str]  # other paths of a weight, and its first

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        _shard_size_multiple: int = 128,
        _use_xla_patched_linear: bool = True,
        _debug_dummy_forward_pass: bool = False,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        _debug_dummy_all_gather_op: bool = False,
        _debug_dummy_all_reduce_op: bool = False,
        _debug_dummy_reduce_scatter_op: bool = False,
        _debug_dummy_optimization_barrier_op: bool = False,
        *,
        mark_step_on_finalization: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_HANDED_ON}
        _check(module, given)
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or XlaFullyShardedDataParallel
            recursive_wrap(module, auto_wrap_policy, wrapper, [], [], only_wrap_children=True, **given)
        by_rows = shard_param_on_dim_0 and not flatten_parameters
        self._cut = PaddedCut(1 if by_rows else _shard_size_multiple, by_rows)
        self.sync_on_finalization = sync_on_finalization or mark_step_on_finalization
        self.sharding_groups = sharding_groups
        materialize(module, param_init_fn)
        self._wrap(module, given)
        self.__dict__.update({name: given[name] for name in _SHOWN})
        if execute_sharding_on_init:
            current_backend().mark_step()

    def _wrap(self, module: nn.Module, given: StateDict) -> None:
        """Shards the module among the ranks that its options name."""
        backend = current_backend()
        device = backend.device() if backend.device_type == "xla" else None
        group = None if device is None else backend.group()
        if self.sharding_groups is not None:
            group = group_among(self.sharding_groups)
            place = given["sharding_rank"], given["sharding_world_size"]
            if (group.rank, group.world_size) != place:
                raise ConfigurationError(
                    f"sharding_groups put this rank at place {group.rank} of {group.world_size}; pass sharding_rank="
                    f"{group.rank} and sharding_world_size={group.world_size} (got {place[0]} and {place[1]})"
                )
        names = ("reshard_after_forward", "disable_reshard_on_root", "flatten_parameters", "compute_dtype")
        compute = given["compute_dtype"]
        mixed = compute is not None and any(
            p.dtype != compute for p in module.parameters() if p.is_floating_point()
        )
        options = {name: given[name] for name in names}
        options["buffer_dtype"] = given["buffer_dtype"] or compute or torch.float32
        super().__init__(
            module,
            process_group=group,
            mixed_precision=mixed,
            fp32_reduce_scatter=given["fp32_reduce_scatter"] and mixed,
            compute_device=device,
            **options,
        )
        self._hold_shards(self._cut)
        self._state.cast_buffers()
        if device is not None:
            for m in self.module.modules():
                move_buffers(m, device)

    # ------------------------------------------------------------ shards
    def _hold_shards(self, cut: PaddedCut) -> None:
        """Takes note of the wrapper's own shards, once they are cut; those of trainable parameters come first."""
        flatten = self._state.options.flatten
        flats = sorted(self._state.listings, key=lambda f: flatten and not f.param.requires_grad)
        self._shards = []
        for index, flat in enumerate(flats):
            if flatten:
                size = torch.Size([flat.layout.numel])
                listed, original = OUTER + flat.places[0].name, f"{FLAT}{index}"
            else:
                size = flat.originals[0].shape
                listed = original = INNER + flat.names[0]
            rows = size[1:] if cut.by_rows and size else None
            whole = ShardLayout(flat.layout.numels, flat.layout.world_size, cut.unit_of(size))
            self._shards.append(Shard(flat, listed, original, size, rows, whole.shard_numel))
        # nn.Module lists a shard in all places of a weight, and state dicts have it once
        shared = {} if flatten else {INNER + name: INNER + first for first, name in self._state.shared_paths}
        self._listed_again = shared
        self.register_load_state_dict_post_hook(end_loading_shards)

    def _holders(self, every_name: bool = False) -> Iterator[tuple[str, XlaFullyShardedDataParallel]]:
        """Lists path and object of this wrapper and those below."""
        for path, m in self.named_modules(remove_duplicate=not every_name):
            if isinstance(m, XlaFullyShardedDataParallel):
                yield path, m

    def _adapted(self, options: Options) -> Options:
        layout = self._cut.layout if options.flatten else EachAlone(self._cut.layout)
        return replace(options, layout=layout, mark_step=self.sync_on_finalization)

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """Returns this wrapper's own shards; those of trainable parameters first."""
        return [shard.flat.param for shard in self._shards]

    @property
    def full_params(self) -> list[nn.Parameter]:
        """Lists the parameters of the module that this wrapper shards, one by one (also if they are flattened).

        ``_has_full_param`` of each says whether it is gathered.
        """
        return [original.param for shard in self._shards for original in shard.flat.originals]

    @property
    def full_param_infos(self) -> list[tuple[str, nn.Module, str]]:
        """Lists path of the module, module and attribute of each of :attr:`full_params`."""
        paths = {m: path for path, m in self.named_modules()}
        firsts = [original.places[0] for shard in self._shards for original in shard.flat.originals]
        return [(paths[place.module], *place) for place in firsts]

    xla_device = FullyShardedDataParallel.compute_device

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns shards of this wrapper and those below, with the paths of their parameters in the wrapped module."""
        return [
            (clean(f"{path}.{shard.original}" if path else shard.original), shard.flat.param)
            for path, m in self._holders()
            for shard in m._shards
        ]

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns shards in torch_xla's order (a wrapper's own come first) and under its names."""
        if self._state.summoned is not None:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        listed = set()
        for path, m in self._holders() if recurse else [("", self)]:
            for shard in m._shards:
                listed.add(shard.flat.param)
                yield ".".join(filter(None, (prefix, path, shard.name))), shard.flat.param
        for name, param in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if param not in listed:
                yield name, param

    # ------------------------------------------------------------ checkpoints
    def get_shard_metadata(self) -> ShardMetadata:
        """Returns what consolidation needs to know; save it beside ``state_dict()``.

        Weights with several names are in ``shared_info``, if there are any.
        """
        found: ShardMetadata = {
            "shard_info": {},
            "flatten_info": {},
            "buffer_info": {},
            "world_size": self.world_size,
            "rank": self.rank,
        }
        paths = {m: clean(path) for path, m in self.named_modules()}
        shared = {name: source for source, name in shared_across(self._state, paths)}
        for path, m in self._holders(every_name=True):
            path = in_state_dict(path)
            infos = found["shard_info"].setdefault(path, {})
            before = f"{path}." if path else ""
            for s in m._shards:
                infos[s.name] = {"_orig_size": s.size, "_orig_name": s.original}
                if m._state.options.flatten:
                    names = [f"_fpw_module.{n}" for n in s.flat.names]
                    shapes = [original.shape for original in s.flat.originals]
                    found["flatten_info"][before + s.original] = names, shapes, list(s.flat.layout.numels)
            for source, name in m._state.shared_paths:
                shared[clean(before + name)] = clean(before + source)
            dtypes = {id(at._buffers.get(n)): dtype for (at, n), dtype in m._state.buffer_dtypes.items()}
            for name, buffer in m.named_buffers():
                if id(buffer) in dtypes:
                    found["buffer_info"][in_state_dict(before + name)] = {"_orig_dtype": dtypes[id(buffer)]}
        if shared:
            found["shared_info"] = shared
        found["run_id"], found["backwards"] = self._state.run_id, self._state.unit.backwards
        return found

    def state_dict(
        self, destination: Entries | None = None, prefix: str = "", keep_vars: bool = False
    ) -> Tree:
        """Returns this rank's shards, and all buffers; arguments as of ``nn.Module.state_dict``."""
        if destination is None:
            destination = empty_entries()
        found = empty_entries()
        with collecting():
            nn.Module.state_dict(self, destination=found, prefix=prefix, keep_vars=keep_vars)
        for shard in self._shards:
            value = found.pop(prefix + shard.listed, None)
            if value is not None:
                destination[prefix + shard.name] = shard.saved(value)
        for key, value in found.items():
            if key[len(prefix) :] not in self._listed_again:
                destination[prefix + in_state_dict(key[len(prefix) :])] = value
        versions = versions_of(destination)
        if versions is not None:
            versions.update(versions_of(found) or {})
        return destination

    def _load_from_state_dict(
        self, state_dict: Entries, prefix: str, *args: object, **kwargs: object
    ) -> None:
        is_local = self._take_saved_names(state_dict, prefix)
        with local_state([self._state] if is_local else ()):
            if is_local:
                begin_loading_shards(self)
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _take_saved_names(self, entries: Entries, prefix: str) -> bool:
        """Turns saved names into those that nn.Module looks for, in place; whether these are shards at all."""
        own = {shard.name: shard for shard in self._shards}
        is_local = any(PREFIX in key for key in entries if key.startswith(prefix))
        for key in [k for k in entries if k.startswith(prefix)]:
            rest = key[len(prefix) :]
            if rest in own:
                shard = own[rest]
                entries[prefix + shard.listed] = shard.loaded(entries.pop(key))
            elif rest.startswith(OUTER) and not rest.startswith((INNER, FLAT)):
                entries[prefix + INNER + rest[len(OUTER) :]] = entries.pop(key)
        for again, first in self._listed_again.items():
            if is_local and prefix + first in entries:
                entries[prefix + again] = entries[prefix + first]
        return is_local

    # ------------------------------------------------------------ steps
    def set_divisors(self, before: float, after: float) -> None:
        """Divides gradients so; as in torch_xla, 1 and 1 leave the division to the reduction: the mean."""
        super().set_divisors(before, self.world_size if (before, after) == (1, 1) else after)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm`` (collective).

        Args:
            max_norm, norm_type: the limit and the norm.
            groups: partition of all ranks; the norm is over the ranks of this rank's part, by default over all.

        Returns:
            The norm before, 0-dim.

        Raises:
            LifecycleError: called on a unit below the root.
        """
        if groups is None and self.sharding_groups is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        group = current_backend().group() if groups is None else group_among(groups)
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        like = norm_like([*self.parameters()]).to(self.compute_device)
        portions = [Portion(gradients, (group,))]
        return clip_by_global_norm(portions, gradients, like, float(max_norm), float(norm_type))

    def extra_repr(self) -> str:
        return (
            f"world_size={self.world_size}, rank={self.rank}, compute_dtype={self.compute_dtype}, "
            f"buffer_dtype={self.buffer_dtype}, flatten_parameters={self.flatten_parameters}, "
            f"reshard_after_forward={self.reshard_after_forward}, sharding_groups={self.sharding_groups}"
        )


def _check(module: nn.Module, options: Mapping[str, object]) -> None:
    if isinstance(module, XlaFullyShardedDataParallel):
        raise ConfigurationError(
            "the module is an FSDP module already; to nest, wrap submodules before the module that holds them"
        )
    if getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__} has no forward (a ModuleList, for example); FSDP acts when a module is called: "
            "wrap modules that are"
        )
    for name in ("compute_dtype", "buffer_dtype"):
        if options[name] is not None and options[name] not in _FLOATS:
            raise ConfigurationError(f"{name} is {options[name]}; choose one of {list(_FLOATS)}")
    dummies = [k for k, v in options.items() if k.startswith("_debug_dummy") and v]
    if dummies:
        raise ConfigurationError(f"{', '.join(dummies)}: there are no dummy operations here; leave it out")


# ------------------------------------------------------------ shards in state dicts
# How they are cut, named, padded and shaped. S: numel of a shard here, R: numel of the saved one (they differ where
# there is one rank only).
Entries = MutableMapping[str, torch.Tensor]


class PaddedCut(NamedTuple):
    """Cuts parameters into whole rows, or into parts that are padded to a multiple of so many elements."""

    multiple: int
    by_rows: bool

    def unit_of(self, size: Sequence[int]) -> int:
        return max(1, math.prod(size[1:])) if self.by_rows and size else self.multiple

    def layout(self, shapes: Sequence[Sequence[int]], world_size: int) -> ShardLayout:
        """Serves as ``Options.layout``. One rank's shard is not cut; state dicts add the padding."""
        numels = tuple(map(math.prod, shapes))
        return ShardLayout(numels, world_size, 1 if world_size == 1 else self.unit_of(shapes[0]))


@dataclass
class Shard:
    """One of a wrapper's flat parameters.

    Attributes:
        listed: where nn.Module finds its shard, as a path within the wrapper.
        original: the same as state dicts have it.
        rows: shape of a row where shards are rows, else None.
        numel: R.
    """

    flat: Registered
    listed: str
    original: str
    size: torch.Size
    rows: torch.Size | None
    numel: int

    name = property(lambda self: shard_name(self.original))

    def saved(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard [S] in the shape that is saved."""
        shard = shard.reshape(-1)
        if shard.numel() < self.numel:
            shard = torch.cat([shard, shard.new_zeros(self.numel - shard.numel())])
        return shard if self.rows is None else shard.view(-1, *self.rows)

    def loaded(self, saved: torch.Tensor) -> torch.Tensor:
        """Does the reverse; a shard of another world size stays as it is, for nn.Module to refuse."""
        now = self.flat.param
        if saved.numel() == self.numel and saved.numel() >= now.numel():
            return saved.reshape(-1)[: now.numel()].view(now.shape)
        return saved


def empty_entries() -> OrderedDict[str, torch.Tensor]:
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    return found
