"""Cuts a model into a chain of modules of about equal size.

``torch.distributed.pipelining`` cuts models for pipelines, with values that skip stages; a chain, as OffloadModel
takes it, hands exactly one value from module to module.
"""

from __future__ import annotations

import torch
import torch.fx
from torch import nn
from torch.fx.node import Node

from shardkit.errors import ConfigurationError


class _ExtendedLeafTracer(torch.fx.Tracer):
    def __init__(self, leaf_modules: set[nn.Module]) -> None:
        super().__init__()
        self.leaf_modules = leaf_modules

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or m in self.leaf_modules


def _trace(model: nn.Module) -> torch.fx.Graph:
    """Returns the model's graph; modules that can't be traced (control flow on values) stay whole."""
    leaves: set[nn.Module] = set()
    # from the inside out: a module that contains one that can't be traced may be traced itself then
    for module in reversed(list(model.modules())):
        tracer = _ExtendedLeafTracer(leaves)
        if module is model or tracer.is_leaf_module(module, ""):
            continue
        try:
            tracer.trace(module)
        except (TypeError, torch.fx.proxy.TraceError):
            leaves.add(module)
    return _ExtendedLeafTracer(leaves).trace(model)


def shard_model(model: nn.Module, shard_count: int = 3) -> list[torch.fx.GraphModule]:
    """Cuts a model into at most so many modules; applied one after the other they are the model.

    A cut is made where a module has more than its share of the parameters, as soon as exactly one value goes on;
    where values skip (residual connections), fewer modules come out. Parameters stay the model's.

    Raises:
        ConfigurationError: ``shard_count`` below 1.
    """
    if shard_count < 1:
        raise ConfigurationError(f"shard_count is {shard_count}; it must be 1 or more")
    graph = _trace(model)
    *nodes, output = graph.nodes
    place = {node: i for i, node in enumerate(graph.nodes)}
    last_input = max((place[n] for n in nodes if n.op == "placeholder"), default=-1)
    share = sum(p.numel() for p in model.parameters()) // shard_count
    counted: set[nn.Parameter] = set()
    pieces: list[list[Node]] = [[]]
    held = 0  # by the last piece
    reach = -1  # up to where what was made before the current node is used
    for i, node in enumerate(nodes):
        pieces[-1].append(node)
        new = {p for p in _params_of(model, node) if p not in counted}
        counted |= new
        held += sum(p.numel() for p in new)
        own_reach = max((place[user] for user in node.users), default=-1)
        only_this_goes_on = reach <= i < own_reach and last_input <= i < len(nodes) - 1
        if held > share and only_this_goes_on and len(pieces) < shard_count:
            pieces.append([])
            held = 0
        reach = max(reach, own_reach)
    return [_module_of(model, pieces, i, output) for i in range(len(pieces))]


def _params_of(model: nn.Module, node: Node) -> list[nn.Parameter]:
    if node.op == "call_module":
        return list(model.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        found = getattr(model.get_submodule(owner), name)
        return [found] if isinstance(found, nn.Parameter) else []
    return []


def _module_of(model: nn.Module, pieces: list[list[Node]], index: int, output: Node) -> torch.fx.GraphModule:
    """Makes piece ``index`` a module of one argument, the value of the node before it (the first: the model's own)."""
    graph = torch.fx.Graph()
    made: dict[Node, Node] = {}
    if index > 0:
        made[pieces[index - 1][-1]] = graph.placeholder(f"placeholder{index}")
    for node in pieces[index]:
        made[node] = graph.node_copy(node, made.__getitem__)
    if index + 1 < len(pieces):
        graph.output(made[pieces[index][-1]])
    else:
        graph.node_copy(output, made.__getitem__)
    return torch.fx.GraphModule(model, graph)
