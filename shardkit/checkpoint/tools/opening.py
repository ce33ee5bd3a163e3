"""Opens a checkpoint of whatever kind: finds out which it is, and reads its tables of contents."""

from __future__ import annotations

import functools
import glob
import io
import os

import torch

from ...errors import ConfigurationError, DamagedFileError
from ...types import StateDict, Tree
from ..format.folders import latest
from ..format.manifest import NAME as MANIFEST
from ..format.manifest import read_manifest, refuse_damage
from ..format.metadata import METADATA, Chunk, Record, read_metadata
from . import hugging_face, rank_files
from .stored import Checkpoint, FilePlace, StoredPart, StoredTensor, find_model, mapped, without_layer
from .torch_files import Contents, held, read_torch_file


def read_folder(folder: str, trust_pickle: bool = False) -> StateDict:
    """Reads what a folder holds, nested as it was saved.

    Args:
        trust_pickle: let torch run what objects in it say.
    """
    table, values = read_metadata(folder), {}
    for name in table.paths:
        if name in table.tensors:
            dtype, shape, chunks = table.tensors[name]
            places = [functools.cache(functools.partial(_place, folder, chunk, dtype)) for chunk in chunks]
            parts = tuple(StoredPart(c.box, place) for c, place in zip(chunks, places, strict=True))
            values[name] = StoredTensor(name, tuple(shape), dtype, parts, dtype)
        else:
            values[name] = _object(folder, table.objects[name], trust_pickle)
    try:
        return table.nested(values)
    except ValueError as error:
        raise DamagedFileError(
            f"{os.path.join(folder, METADATA)} makes no sense ({error}); take another copy, or an earlier checkpoint"
        ) from None


def _place(folder: str, chunk: Chunk, dtype: torch.dtype) -> FilePlace:
    """Finds the elements of a chunk: it is a file of ``torch.save`` within the file."""
    record, path = chunk.record, os.path.join(folder, chunk.record.file)
    record.check(folder)
    found = Contents(path, record.offset, record.length, f"tensor {record.name!r}").tree()
    if not isinstance(found, StoredTensor) or (found.shape, found.stored_dtype) != (chunk.box.sizes, dtype):
        raise DamagedFileError(
            f"{path}: tensor {record.name!r} is another one than the table of contents says; take an earlier "
            "checkpoint"
        )
    return found.parts[0].where()


def _object(folder: str, record: Record, trust_pickle: bool) -> Tree:
    record.check(folder)
    path = os.path.join(folder, record.file)
    if trust_pickle:
        with open(path, "rb") as file:
            file.seek(record.offset)
            value = torch.load(io.BytesIO(file.read(record.length)), map_location="cpu", weights_only=False)
            return mapped(value, held)
    return mapped(Contents(path, record.offset, record.length, repr(record.name)).values(), held)


_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def open_checkpoint(path: str, *, model_key: str | None = None, trust_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint of any kind; tensors stay in their files.

    Args:
        path: folder of a step or of steps (the latest is taken), DCP or Hugging Face folder, file of ``torch.save`` or
            safetensors, folder or pattern of the files of all ranks.
        model_key: key of the model's state dict, where it is not one of the usual ones.
        trust_pickle: run what files say; see :func:`shardkit.load`.

    Raises:
        ConfigurationError: it is none of these, or something of it is missing.
        UntrustedFileError, DamagedFileError: see :func:`shardkit.load`.
    """
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, METADATA)):
        path = latest(path) or path
    if os.path.exists(os.path.join(path, METADATA)):
        return _of_folder(path, model_key, trust_pickle)
    if os.path.exists(path) and hugging_face.weight_files(path):
        weights, left_out = hugging_face.read_weights(path, trust_pickle), []
        if "lm_head.weight" not in weights and hugging_face.ties_without_saying(path):
            left_out.append(
                "names of tied weights that the files don't have (config.json: tie_word_embeddings); tie_weights() of "
                "the model, or load_state_dict(strict=False), brings them back"
            )
        return Checkpoint(path, "hf", weights, left_out=left_out)
    return _of_files(path, files_of_ranks(path), model_key, trust_pickle)


def files_of_ranks(path: str) -> list[str]:
    """Lists the files of torch.save that a path is: itself, those in the folder, or those that match a pattern."""
    if os.path.isfile(path):
        return [path]
    if not os.path.exists(path):
        matching = rank_files.in_natural_order(glob.glob(path))
        if not matching:
            raise ConfigurationError(f"there is no {path}")
        return matching
    files = [
        os.path.join(path, n) for n in os.listdir(path) if n.endswith(_ENDINGS) and not n.startswith(".")
    ]
    if files:
        return rank_files.in_natural_order(files)
    raise ConfigurationError(
        f"{path} is no checkpoint: it has no complete step-NNNNNNNN folder, no {METADATA} (torch's distributed "
        f"checkpoint), no *.safetensors, and no files of ranks ({', '.join(_ENDINGS)})"
    )


def _of_folder(path: str, model_key: str | None, trust_pickle: bool) -> Checkpoint:
    facts: dict[str, object] = {}
    kind = "dcp"
    if os.path.exists(os.path.join(path, MANIFEST)):
        try:
            manifest = read_manifest(path)
            if METADATA not in manifest.files:
                raise DamagedFileError(f"{path}: its {MANIFEST} doesn't name {METADATA}")
            refuse_damage(path, manifest, [METADATA])  # tensors have a CRC-32 each, which is compared later
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; shardkit ckpt verify {path} tells more") from None
        facts, kind = manifest.facts, "shardkit"
    return _with_model(path, kind, read_folder(path, trust_pickle), model_key, facts)


def _with_model(
    path: str, kind: str, tree: StateDict, model_key: str | None, facts: dict[str, object]
) -> Checkpoint:
    left_out = []
    if model_key is None:
        tree, layer = without_layer(tree)
        if layer is not None:
            left_out.append(f"the key {layer!r} around everything")
    return Checkpoint(path, kind, tree, find_model(tree, model_key, path), facts, left_out)


def _of_files(path: str, files: list[str], model_key: str | None, trust_pickle: bool) -> Checkpoint:
    trees = [read_torch_file(file, trust_pickle) for file in files]
    kinds = {rank_files.kind_of(tree) for tree in trees}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{path} has files of ranks and others; pass a pattern ('folder/rank*.pth') that has the ranks' alone"
        )
    kind = kinds.pop()
    if kind is not None:
        model, world_size, others = rank_files.read_rank_files(files, trees, kind)
        left_out = [f"{key!r} in the files of ranks" for key in others]
        return Checkpoint(path, kind, model, (), {"world_size": world_size}, left_out)
    if len(files) > 1:
        raise ConfigurationError(
            f"{path} has {len(files)} files that each are a checkpoint; pass one of them"
        )
    if not isinstance(trees[0], dict):
        raise ConfigurationError(f"{files[0]} holds a {type(trees[0]).__name__}, and a checkpoint is a dict")
    return _with_model(files[0], "torch", trees[0], model_key, {})
