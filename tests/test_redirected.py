"""Names without a purpose today: importing, subclassing and isinstance work, any use says what to take instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from shardkit.errors import RedirectedError
from shardkit.redirected import is_redirected, redirected, redirected_function, redirected_names

Old = redirected("nn.attic.Old", "torch.nn.New", why="torch has it")
old_function = redirected_function("nn.attic.old_function", "torch.new_function", why="torch has it")


class Child(Old):  # type: ignore[misc, valid-type]
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("use", "names"),
    [
        (lambda: Old(), ["fairscale.nn.attic.Old", "torch.nn.New", "torch has it"]),
        (lambda: Old(1, size=2), ["torch.nn.New"]),
        (lambda: Child(3), ["torch.nn.New"]),
        (lambda: Old.from_config, ["torch.nn.New", "from_config"]),
        (lambda: Child.from_config(), ["torch.nn.New", "from_config"]),
        (lambda: old_function(1, key=2), ["fairscale.nn.attic.old_function", "torch.new_function"]),
    ],
)
def test_use_says_what_to_take(use: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(RedirectedError) as caught:
        use()
    for name in names:
        assert name in str(caught.value)


def test_what_does_not_use_it_works() -> None:
    assert not isinstance(1, Old)
    assert issubclass(Child, Old)
    assert (Old.__module__, Old.__qualname__) == ("shardkit.nn.attic", "Old")
    assert old_function.__module__ == "shardkit.nn.attic"
    assert not hasattr(Old, "__wrapped__")
    assert "torch.nn.New" in str(inspect.getdoc(Old))


def test_names_of_a_module() -> None:
    get = redirected_names("shardkit.nn.attic", ["LIMIT"], "torch.nn.New", why="torch has it")
    assert is_redirected(get("LIMIT"))
    assert get("LIMIT") is get("LIMIT")
    with pytest.raises(RedirectedError, match=r"fairscale\.nn\.attic\.LIMIT is not carried over"):
        get("LIMIT")()
    with pytest.raises(AttributeError, match="no attribute 'LIMITS'"):
        get("LIMITS")


def test_only_the_name_itself_is_marked() -> None:
    assert is_redirected(Old)
    assert is_redirected(old_function)
    assert not is_redirected(Child)
    assert not is_redirected(int)
    assert not is_redirected(3)
