"""Who gossips with whom: what one node sends to, the other one hears from, in every step of every graph."""

from __future__ import annotations

import inspect

import pytest

from shardkit.errors import ConfigurationError
from shardkit.experimental.nn.data_parallel.gossip import graph_manager as graphs

GRAPHS = [
    g for n, g in vars(graphs).items() if isinstance(g, type) and not inspect.isabstract(g) and "Graph" in n
]


def _nodes(graph: type[graphs.GraphManager], world_size: int, peers: int) -> list[graphs.GraphManager]:
    return [graph(rank, world_size, peers_per_itr=peers) for rank in range(world_size)]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_every_step_of_every_graph(graph: type[graphs.GraphManager]) -> None:
    made = 0
    for world_size in range(2, 10):
        for peers in (1, 2, 3):
            try:
                nodes = _nodes(graph, world_size, peers)
            except ConfigurationError:
                continue
            made += 1
            reached: list[set[int]] = [set() for _ in nodes]
            for step in range(2 * world_size):
                steps = [node.get_peers(rotate=step > 0 and node.is_dynamic_graph()) for node in nodes]
                sent = {(rank, peer) for rank, (out, _) in enumerate(steps) for peer in out}
                heard = {(peer, rank) for rank, (_, into) in enumerate(steps) for peer in into}
                assert sent == heard
                assert len(sent) == world_size * peers
                for rank, (out, into) in enumerate(steps):
                    assert rank not in out
                    assert len(set(out)) == len(out) == len(into) == peers
                    reached[rank] |= set(out)
                    if nodes[rank].is_bipartite_graph():
                        assert all(nodes[rank].is_passive() != nodes[rank].is_passive(p) for p in out)
            for rank, node in enumerate(nodes):
                everybody = {edge.dest for edge in node.phone_book[rank]}
                assert reached[rank] == everybody if node.is_dynamic_graph() else reached[rank] <= everybody
    assert made >= 4


class Neighbours(graphs.GraphManager):
    """A graph of a user's own, by the methods that fairscale's has."""

    def _make_graph(self) -> None:
        for rank in range(self.world_size):
            self._add_peers(rank, [self._rotate_forward(rank, 1), self._rotate_backward(rank, 1)])


def test_a_graph_of_ones_own() -> None:
    book = Neighbours(0, 4).phone_book
    assert [[edge.dest for edge in edges] for edges in book] == [[1, 3], [2, 0], [3, 1], [0, 2]]
    assert not issubclass(graphs.DynamicBipartiteLinearGraph, graphs.DynamicDirectedLinearGraph)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_what_is_no_graph(graph: type[graphs.GraphManager]) -> None:
    for world_size, peers in ((1, 1), (4, 0), (4, 4)):
        with pytest.raises(ConfigurationError):
            graph(0, world_size, peers_per_itr=peers)
    if graph.is_bipartite_graph(object.__new__(graph)):
        with pytest.raises(ConfigurationError, match="even number"):
            graph(0, 5)
