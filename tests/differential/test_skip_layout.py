"""Routes of skip tensors, drawn: the same as fairscale finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardkit.nn.pipe.skip import Namespace, pop, skippable, stash
from shardkit.nn.pipe.skip.layout import inspect_skip_layout

pytestmark = pytest.mark.oracle


def _layers(
    library: object, routes: list[tuple[int, int]], isolated: bool, partitions: int
) -> list[nn.Sequential]:
    """A layer that stashes and one that pops for each route, under names of their own or in namespaces."""
    module: list[list[nn.Module]] = [[] for _ in range(partitions)]
    for k, (here, there) in enumerate(routes):
        name = "same" if isolated else f"name{k}"

        class Stashing(nn.Module):
            def forward(self, x):  # type: ignore[no-untyped-def]
                yield library.stash(name, x)  # noqa: B023
                return x

        class Popping(nn.Module):
            def forward(self, x):  # type: ignore[no-untyped-def]
                return x + (yield library.pop(name))  # noqa: B023

        both = [library.skippable(stash=[name])(Stashing)(), library.skippable(pop=[name])(Popping)()]
        if isolated:
            space = library.Namespace()
            both = [layer.isolate(space) for layer in both]
        module[here].append(both[0])
        module[max(here, there)].append(both[1])
    return [nn.Sequential(*layers) for layers in module]


class Ours:
    Namespace, pop, skippable, stash = (
        Namespace,
        staticmethod(pop),
        staticmethod(skippable),
        staticmethod(stash),
    )


@given(
    st.booleans(), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5)
)
def test_routes(isolated: bool, partitions: int, routes: list[tuple[int, int]]) -> None:
    from fairscale.nn.pipe import skip as theirs
    from fairscale.nn.pipe.skip.layout import inspect_skip_layout as their_layout

    routes = [(here % partitions, there % partitions) for here, there in routes]
    ours = inspect_skip_layout(_layers(Ours, routes, isolated, partitions))
    right = their_layout(_layers(theirs, routes, isolated, partitions))
    for k in range(partitions):
        for of in ("copy_policy", "copy_policy_by_src"):
            found, expected = (
                [(j, ns is not None, name) for j, ns, name in getattr(layout, of)(k)]
                for layout in (ours, right)
            )
            assert found == expected, of
    assert [ours.requires_copy(*key) for key in ours.by_ns_name] == [
        right.requires_copy(*key) for key in right.by_ns_name
    ]
    assert not ours.requires_copy(None, "of nobody")
