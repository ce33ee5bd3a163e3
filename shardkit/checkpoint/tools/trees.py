"""What a checkpoint holds: containers as they were saved, with stored tensors and plain values in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch

from ...errors import ConfigurationError
from ...types import StateDict, Tree
from .stored import StoredTensor

Path: TypeAlias = tuple[object, ...]
"""Keys of dicts and indices of lists that lead to something."""

# Under which programs keep the model's state dict in a file.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER_KEYS = (
    "optimizer", "optim", "optimizer_state_dict", "optimizer_state", "optimizers", "optimizer_states",
)  # fmt: skip


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that was opened. Nothing but its tables of contents was read.

    Attributes:
        path: as it was passed, or the step's folder that was chosen.
        kind: "shardkit", "dcp", "torch", "fairscale", "xla" or "hf".
        tree: dict of all that it holds.
        model_path: keys that lead to the model's state dict; none: the tree is the state dict.
        facts: what is known beside: step, world size, when it was written, ...
        left_out: what it holds that is not in the tree, in words.
    """

    path: str
    kind: str
    tree: StateDict
    model_path: Path = ()
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def model(self) -> StateDict:
        """The model's state dict by name."""
        return dict(flat_items(at(self.tree, self.model_path)))

    @property
    def optimizer_path(self) -> Path | None:
        """Keys that lead to the optimizer's state dict, where there is one; frameworks keep a list of them."""
        for key in _OPTIMIZER_KEYS if self.model_path else ():
            value = self.tree.get(key)
            if isinstance(value, Mapping) and "param_groups" in value:
                return (key,)
            only = value[0] if isinstance(value, list) and len(value) == 1 else None
            if isinstance(only, Mapping) and "param_groups" in only:
                return (key, 0)
        return None

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """All tensors, under dotted names."""
        for path, value in leaves(self.tree):
            if isinstance(value, StoredTensor):
                yield dotted(path), value

    def values(self) -> Iterator[tuple[str, object]]:
        """All that is no tensor."""
        for path, value in leaves(self.tree):
            if not isinstance(value, StoredTensor):
                yield dotted(path), value


def dotted(path: Path) -> str:
    """Keys joined as torch's planner does."""
    return ".".join(map(str, path))


def at(tree: Tree, path: Path) -> Tree:
    """What keys lead to."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Tree, path: Path, value: Tree) -> None:
    """Replaces what keys lead to."""
    at(tree, path[:-1])[path[-1]] = value


def holds_tensors(value: object) -> bool:
    """Whether a container has tensors in it, at any depth."""
    if isinstance(value, Mapping):
        return any(holds_tensors(v) for v in value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensors(v) for v in value)
    return isinstance(value, StoredTensor | torch.Tensor)


def leaves(tree: object, path: Path = (), tuples: bool = True) -> Iterator[tuple[Path, object]]:
    """Tensors, and values without tensors in them, with their keys. A list of plain values is one value.

    Args:
        tuples: look for tensors in tuples, too; torch's planner doesn't.
    """
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key), tuples)
    elif (isinstance(tree, list) or (tuples and isinstance(tree, tuple))) and _is_taken_apart(tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index), tuples)
    else:
        yield path, tree


def _is_taken_apart(values: list[object] | tuple[object, ...]) -> bool:
    return any(
        isinstance(v, Mapping | StoredTensor) or (isinstance(v, list | tuple) and _is_taken_apart(v))
        for v in values
    )


def flat_items(tree: object) -> Iterator[tuple[str, object]]:
    """The leaves under dotted names."""
    for path, value in leaves(tree):
        yield dotted(path), value


def replaced(tree: Tree, change: Callable[[Path, Tree], Tree], path: Path = ()) -> Tree:
    """The same containers (dicts and lists are changed in place, so that they stay what they are) with other leaves."""
    if isinstance(tree, dict):
        for key in tree:
            tree[key] = replaced(tree[key], change, (*path, key))
        return tree
    if isinstance(tree, list):
        tree[:] = [replaced(v, change, (*path, i)) for i, v in enumerate(tree)]
        return tree
    if type(tree) is tuple:
        return tuple(replaced(v, change, (*path, i)) for i, v in enumerate(tree))
    return change(path, tree)


def copied(tree: Tree, change: Callable[[Path, Tree], Tree], path: Path = ()) -> Tree:
    """New containers of the same types and attributes (``_metadata`` of a state dict) with other leaves."""
    if isinstance(tree, dict):
        made = type(tree)()
        made.update({key: copied(value, change, (*path, key)) for key, value in tree.items()})
        if hasattr(tree, "__dict__"):
            made.__dict__.update(tree.__dict__)
        return made
    if isinstance(tree, list):
        return [copied(v, change, (*path, i)) for i, v in enumerate(tree)]
    if type(tree) is tuple:
        return tuple(copied(v, change, (*path, i)) for i, v in enumerate(tree))
    return change(path, tree)


def _is_state_dict(value: object) -> bool:
    """Names and tensors, with a few other values at most (``_extra_state``)."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return False
    tensors = sum(isinstance(v, StoredTensor) for v in value.values())
    return tensors > 0 and 2 * tensors >= len(value)


def find_model(tree: StateDict, key: str | None, where: str) -> Path:
    """Keys that lead to the model's state dict.

    Args:
        key: what a user says it is ("a.b": below another one); None: known names are tried.

    Raises:
        ConfigurationError: there is none.
    """
    if key is not None:
        found: Tree = tree
        path = (key,) if key in tree else tuple(key.split("."))
        for part in path:
            if not isinstance(found, Mapping) or part not in found:
                raise ConfigurationError(f"{where} has no {key!r}; its keys are {_names(tree)}")
            found = found[part]
        return path
    for name in _MODEL_KEYS:
        if isinstance(tree.get(name), Mapping) and holds_tensors(tree[name]):
            return (name,)
    if _is_state_dict(tree):
        return ()
    held = [k for k, v in tree.items() if _is_state_dict(v)]
    if len(held) == 1:
        return (held[0],)
    raise ConfigurationError(
        f"{where}: none of its keys is known for a model's state dict ({_names(tree)}); pass --model-key KEY"
    )


def without_layer(tree: StateDict) -> tuple[StateDict, str | None]:
    """What is in the one key of a checkpoint, if the model's and the optimizer's are in there; and that key."""
    for key, value in tree.items() if len(tree) == 1 else ():
        if isinstance(value, dict) and any(isinstance(value.get(name), Mapping) for name in _MODEL_KEYS):
            return value, key
    return tree, None


def _names(tree: Mapping[str, object]) -> str:
    names = [str(k) for k in tree]
    return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "")
