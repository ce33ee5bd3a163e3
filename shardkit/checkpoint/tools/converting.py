"""Converts checkpoints of any kind to another, one tensor at a time."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence

import torch

from ...errors import ConfigurationError
from ...types import StateDict, Tree
from ..data_file import Written, describe
from ..files.writing import folder_written_whole, write_atomically
from ..format.manifest import NAME as MANIFEST
from ..format.manifest import Manifest, ManifestItem, best_hash, stored_file
from ..format.metadata import dotted, read_metadata
from . import rank_files
from .comparing import compared, open_checkpoint
from .hugging_face import check_shard_size, without_wrappers, write_hugging_face
from .stored import Checkpoint, Path, StoredTensor, at, leaves, mapped, put
from .torch_files import write_torch_file


def is_by_name(optimizer: StateDict) -> bool:
    listed = [p for group in optimizer["param_groups"] for p in group.get("params", [])]
    return bool(listed) and all(isinstance(p, str) for p in listed)


def says_names(optimizer: StateDict) -> bool:
    """Says whether param groups tell the name of each number, as those of an optimizer of named_parameters() do."""
    return all(len(g.get("param_names") or ()) == len(g["params"]) for g in optimizer["param_groups"])


def by_number(optimizer: StateDict) -> StateDict:
    """Numbers parameters by their places in all groups, as ``Optimizer.state_dict()`` does, and OSS."""
    groups, numbers = [], dict[str, int]()
    for group in optimizer["param_groups"]:
        names = list(group.get("params", []))
        for name in names:
            numbers[name] = len(numbers)
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**rest, "params": [numbers[n] for n in names], "param_names": names})
    state = optimizer.get("state") or {}
    unknown = [name for name in state if name not in numbers]
    if unknown:
        raise ConfigurationError(
            f"the optimizer has a state of {unknown[0]!r}, which is in none of its param groups; pass --model-only to "
            "leave the optimizer out"
        )
    found = {numbers[name]: values for name, values in state.items()}
    return {**optimizer, "state": dict(sorted(found.items())), "param_groups": groups}


def by_name(optimizer: StateDict, model: Mapping[str, Tree], params: list[str]) -> StateDict | None:
    """Names parameters, the reverse. None where it is not certain which parameter a number is.

    Args:
        model: the model's state dict.
        params: names in it that are parameters, in its order.
    """
    groups = optimizer["param_groups"]
    numbers = [p for group in groups for p in group.get("params", [])]
    units = {*(optimizer.get("param_id_map") or {}).values()}  # by which fairscale's FSDP numbers them
    if says_names(optimizer):
        names = [name for group in groups for name in group["param_names"]]
    elif len(groups) == 1 and len(numbers) == len(params) and len(units) < 2:
        names = params
    else:
        return None
    known = dict(zip(map(str, numbers), names, strict=True))
    if len(known) != len(numbers):
        return None
    state = {}
    for number, values in (optimizer.get("state") or {}).items():
        name = known.get(str(number))
        if name is None or not _fits(model.get(name), values):
            return None
        state[name] = values
    made = []
    for group in groups:
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        made.append({"params": [known[str(p)] for p in group["params"]], **rest})
    return {**optimizer, "state": state, "param_groups": made}


def _fits(param: Tree, values: Tree) -> bool:
    """Says whether moments have their parameter's shape; counters are numbers."""
    if not isinstance(param, StoredTensor) or not isinstance(values, Mapping):
        return False
    shapes = {v.shape for v in values.values() if isinstance(v, StoredTensor) and v.numel > 1}
    return shapes <= {param.shape}


def tie(model: StateDict, pairs: Sequence[tuple[str, str]]) -> None:
    """Puts one tensor under both names, in place.

    Args:
        pairs: (name, the name that it is kept under).
    """
    for name, kept in pairs:
        tensor, other = model.get(name), model.get(kept)
        if not isinstance(tensor, StoredTensor) or not isinstance(other, StoredTensor):
            missing = name if not isinstance(tensor, StoredTensor) else kept
            raise ConfigurationError(f"--tied {name}={kept}: the model has no tensor {missing!r}")
        if tensor.shape != other.shape or tensor.dtype != other.dtype or not compared(tensor, other)[0]:
            raise ConfigurationError(f"--tied {name}={kept}: their values differ, so they are two weights")
        identity = ("tied", kept) if other.identity is None else other.identity
        model[name] = model[kept] = dataclasses.replace(other, identity=identity)


_DATA = "__0_0.distcp"


def write_distributed(folder: str, tree: StateDict, checkpoint: Checkpoint) -> None:
    """Writes one data file, the table of contents, and checksums of all.

    Args:
        folder: empty.
        checkpoint: that the tree was made of.
    """
    step = checkpoint.facts.get("step", checkpoint.tree.get("step"))
    run = str(checkpoint.facts.get("run", "converted"))
    whole: set[Path] = set()
    if checkpoint.kind in ("shardkit", "dcp"):
        table = read_metadata(checkpoint.path)
        whole |= {table.paths[name] for name in table.objects}
    own: Tree = tree.get("rank_states")
    own = own if isinstance(own, dict) else {}
    if own:  # a training, by whatever files it came
        whole |= {("scheduler",), ("scaler",), *(("rank_states", r, k) for r in own for k in own[r])}
    records: list[Written] = []
    path = os.path.join(folder, _DATA)
    with open(path, "wb") as file:
        for keys, value in leaves(tree, whole=whole):
            start, shape, dtype = file.tell(), None, None
            if isinstance(value, StoredTensor):
                write_torch_file(file, value)
                shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
            else:
                # as DCP does; tensors that are in it (in a tuple) are read
                buffer = io.BytesIO()
                torch.save(mapped(value, lambda _, v: v.read() if isinstance(v, StoredTensor) else v), buffer)
                file.write(buffer.getbuffer())
            box = None if shape is None else ((0,) * len(shape), shape)
            records.append(Written(_keys(tree, keys), dtype, shape, box, start, file.tell() - start, ""))
    kind = best_hash()
    items = [ManifestItem(dotted(r.path), r.offset, r.length, "") for r in records]
    files = {_DATA: stored_file(path, items, kind)}
    number, ranks = step if type(step) is int else 0, len(own) or 1  # restore_training() looks for so many
    manifest = Manifest(step=number, run=run, world_size=ranks, files=files, hash=kind)
    describe(folder, {_DATA: records}, manifest)


def _keys(tree: Tree, path: tuple[object, ...]) -> tuple[str | int, ...]:
    """Returns keys of dicts as text, as DCP has them; of lists as numbers."""
    keys: list[str | int] = []
    for key in path:
        keys.append(key if isinstance(tree, list) and isinstance(key, int) else str(key))
        tree = tree[key]
    return tuple(keys)


KINDS = ("dcp", "torch", "fairscale", "xla", "hf")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Options of a conversion.

    Attributes:
        to: one of KINDS.
        ranks: so many files of ranks (fairscale, xla).
        dtype: of the model's floating point tensors; None: as they are.
        max_shard_size: of a file in bytes, for hf.
        model_only: leave all but the model's state dict out, and what it lies in.
        overwrite: DST may be there.
        buffers: for files of ranks, names (or patterns) of tensors that are buffers.
        tied: pairs of names of one weight, where the source doesn't tell; they have to be equal to the bit.
        files_from: for hf, a folder whose configuration and tokenizer are copied; a source of kind hf is one.
    """

    to: str
    ranks: int | None = None
    dtype: torch.dtype | None = None
    max_shard_size: int = 5 * 10**9
    model_only: bool = False
    overwrite: bool = False
    buffers: tuple[str, ...] = ()
    files_from: str | None = None
    tied: tuple[tuple[str, str], ...] = ()

    @property
    def is_file(self) -> bool:
        """Says whether one file is written, no folder."""
        return self.to == "torch" or (self.to == "fairscale" and self.ranks is None)


@dataclasses.dataclass
class Converted:
    """A report of a conversion.

    Attributes:
        source, target: kinds.
        tensors, bytes: that were written, tied ones once for each name.
        notes: what a user should know: what was left out, and what changed its name.
    """

    source: str
    target: str
    tensors: int = 0
    bytes: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


def convert(checkpoint: Checkpoint | str, path: str, how: Conversion) -> Converted:
    """Writes a checkpoint in another format.

    Memory: one tensor, and some MB.

    Args:
        checkpoint: an opened one, or a path.
        path: of what is written, a folder, or for torch (and fairscale without ranks) a file.

    Raises:
        ConfigurationError: it is there already, or is the source; or what is asked for has no meaning.
        DamagedFileError: of the source; nothing is written.
        FileNotWrittenError: the disk is full, or the folder can't be written to.
    """
    if isinstance(checkpoint, str):
        checkpoint = open_checkpoint(checkpoint)
    _check(checkpoint, path, how)
    done = Converted(checkpoint.kind, how.to)
    if how.to != "hf" or checkpoint.kind != "hf":
        done.notes += [f"left out: {what}" for what in checkpoint.left_out]
    tree = _prepared(checkpoint, how, done)
    if how.is_file:
        with write_atomically(path) as file:
            write_torch_file(file, tree)
    else:
        with folder_written_whole(path, how.overwrite) as folder:
            _write_folder(folder, tree, checkpoint, how, done)
    return done


def _check(checkpoint: Checkpoint, path: str, how: Conversion) -> None:
    if how.to not in KINDS:
        raise ConfigurationError(f"--to {how.to}: known are {', '.join(KINDS)}")
    if how.ranks is not None and (how.to not in ("fairscale", "xla") or how.ranks < 1):
        raise ConfigurationError(
            f"--ranks {how.ranks} --to {how.to}: only fairscale's and xla's checkpoints are files of ranks, 1 or more"
        )
    if how.to == "xla" and how.ranks is None:
        raise ConfigurationError("--to xla writes a file for each rank; pass --ranks N")
    check_shard_size(how.max_shard_size)
    real, source = os.path.realpath(path), os.path.realpath(checkpoint.path)
    if real == source or real.startswith(source + os.sep) or source.startswith(real + os.sep):
        raise ConfigurationError(
            f"{path} and the source {checkpoint.path} lie in each other; pass another path"
        )
    if os.path.lexists(path):
        if not how.overwrite:
            raise ConfigurationError(f"{path} is there already; pass --overwrite, or another path")
        # no checkpoint, such as somebody's home directory, is replaced
        there = os.listdir(path) if os.path.isdir(path) else []
        endings = (".distcp", ".metadata", ".safetensors", ".pth", ".pt", ".bin", MANIFEST)
        is_other = how.is_file or (there and not any(name.endswith(endings) for name in there))
        if os.path.isdir(path) and is_other:
            raise ConfigurationError(
                f"{path} is a folder, and no checkpoint: it is not overwritten; pass another path"
            )
    if not os.path.isdir(os.path.dirname(real)):
        raise ConfigurationError(
            f"there is no folder {os.path.dirname(real)} to write {path} into; make it first"
        )


# ------------------------------------------------------------ what is written
def _prepared(checkpoint: Checkpoint, how: Conversion, done: Converted) -> StateDict:
    """Returns the tree for a target: the model alone or all, with other dtypes, names and numbers."""
    inside = len(checkpoint.model_path)

    def cast(path: tuple[object, ...], value: Tree) -> Tree:
        of_model = path[:inside] == checkpoint.model_path
        if how.dtype is None or not of_model or not isinstance(value, StoredTensor):
            return value
        # bytes are codes of quantized weights, whose scales lie elsewhere
        is_number = value.dtype.is_floating_point and value.dtype.itemsize > 1
        return value.cast(how.dtype) if is_number else value

    tree = mapped(checkpoint.tree, cast)
    tie(at(tree, checkpoint.model_path), how.tied)
    of_ranks = how.ranks is not None
    if how.model_only or how.to == "hf" or of_ranks:
        return _model_alone(checkpoint, tree, how, done)
    path = checkpoint.optimizer_path
    if how.to == "fairscale" and path is not None and is_by_name(at(tree, path)):
        put(tree, path, by_number(at(tree, path)))
        done.notes.append(
            f"{dotted(path)}: parameters are numbered in the order of its param groups, as OSS does"
        )
    if how.to == "dcp":
        tree = _for_dcp(checkpoint, tree, done)
    _count(tree, done)
    return tree


def _model_alone(checkpoint: Checkpoint, tree: StateDict, how: Conversion, done: Converted) -> StateDict:
    others = [str(k) for k in tree if checkpoint.model_path and k != checkpoint.model_path[0]]
    if others:
        what = "files of ranks hold" if how.ranks else "Hugging Face's format holds"
        why = "" if how.model_only else f" ({what} the model alone)"
        done.notes.append(f"left out{why}: {', '.join(others)}")
    tree = at(tree, checkpoint.model_path)
    if how.to == "hf":
        tree = Checkpoint("", "", tree).model
        tree, removed = without_wrappers(tree)
        if removed:
            done.notes.append(
                f"names are without {''.join(removed)!r}, which a wrapper put in front of all of them"
            )
    _count(tree, done)
    return {"model": tree} if how.to == "dcp" else tree


def _for_dcp(checkpoint: Checkpoint, tree: StateDict, done: Converted) -> StateDict:
    """Puts it under the keys that shardkit.restore_training and torch's own programs look for."""
    if not checkpoint.model_path:
        return {"model": tree}
    if checkpoint.model_path != ("model",) and len(checkpoint.model_path) == 1 and "model" not in tree:
        done.notes.append(f"{checkpoint.model_path[0]!r} is called 'model'")
        tree = {("model" if k == checkpoint.model_path[0] else k): v for k, v in tree.items()}
    path = checkpoint.optimizer_path
    if path is None:
        return tree
    if not is_by_name(at(tree, path)):
        _name_parameters(checkpoint, tree, path, done)
    if path != ("optimizer",):
        done.notes.append(f"{dotted(path)!r} is called 'optimizer'")
        optimizer = at(tree, path)
        tree = {k: v for k, v in tree.items() if k != path[0]}
        tree["optimizer"] = optimizer
    return tree


def _name_parameters(checkpoint: Checkpoint, tree: StateDict, path: Path, done: Converted) -> None:
    """Puts names for numbers in the optimizer's state, where it is certain which they are."""
    old, key, model = at(tree, path), dotted(path), checkpoint.model
    named = by_name(old, model, list(rank_files.sort_out(model, []).params))
    if named is None:
        done.notes.append(
            f"{key} stays by numbers, since it doesn't say which parameters they are (an optimizer of "
            "named_parameters() does): only programs with the same numbers can load it"
        )
        return
    taken = "" if says_names(old) else ": its numbers were taken for those of model.parameters()"
    done.notes.append(f"{key} is by the names of parameters{taken}")
    put(tree, path, named)


def _count(tree: StateDict, done: Converted) -> None:
    for _, tensor in Checkpoint("", "", tree).tensors():
        done.tensors += 1
        done.bytes += tensor.nbytes


def _write_folder(
    folder: str, tree: StateDict, checkpoint: Checkpoint, how: Conversion, done: Converted
) -> None:
    if how.to == "dcp":
        write_distributed(folder, tree, checkpoint)
    elif how.to == "hf":
        files_from = how.files_from
        if files_from is None and checkpoint.kind == "hf" and os.path.isdir(checkpoint.path):
            files_from = checkpoint.path
        done.notes += write_hugging_face(folder, tree, how.max_shard_size, files_from)
        if not os.path.isfile(os.path.join(folder, "config.json")):
            done.notes.append(
                "there is no config.json beside; from_pretrained needs one (--files-from FOLDER copies it)"
            )
    else:
        _write_ranks(folder, tree, how, done)


def _write_ranks(folder: str, tree: StateDict, how: Conversion, done: Converted) -> None:
    cut = rank_files.sort_out({dotted((k,)): v for k, v in tree.items()}, list(how.buffers))
    others = [k for k, v in tree.items() if not isinstance(v, StoredTensor)]
    if others:
        done.notes.append(f"left out, since it is no tensor: {', '.join(others)}")
    done.notes.append(
        f"each of {len(cut.params)} parameters is cut by itself, as FSDP(flatten_parameters=False) around the whole "
        f"model does; {len(cut.buffers)} tensors are taken for buffers (--buffer NAME says which are more)"
    )
    write = rank_files.write_for_xla if how.to == "xla" else rank_files.write_for_fairscale
    write(folder, cut, how.ranks or 1)
