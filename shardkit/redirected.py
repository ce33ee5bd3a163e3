"""Names of fairscale that serve no purpose on today's torch: importable, and on use they say what to take.

Code that only imports such a name, subclasses it or asks ``isinstance`` keeps working; building one, calling one or
reading an attribute of its class raises :class:`shardkit.errors.RedirectedError`. To be used at fairscale's path::

    from shardkit.redirected import redirected, redirected_function

    AsyncPipe = redirected(
        "nn.pipe.async_pipe.AsyncPipe", "torch.distributed.pipelining.Schedule1F1B", why="torch schedules stages itself"
    )
    broadcast_object = redirected_function(
        "optim.oss._broadcast_object", "torch.distributed.broadcast_object_list", why="torch has it since 1.8"
    )

Each name is listed with its reason in tests/parity/differences.py as well (kind "redirected"), from which
docs/PARITY.md is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from shardkit.errors import RedirectedError

__all__ = ["is_redirected", "redirected", "redirected_function", "redirected_names", "without_arguments"]

MARK = "__redirected__"
_F = TypeVar("_F", bound=Callable[..., Any])


class _RedirectedMeta(type):
    """Methods and constants looked up on the class itself are a use of it, too."""

    def __getattr__(cls, attribute: str) -> Any:
        # What Python and its tools ask every class for (pickle, doctest, inspect) is no use of it.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise RedirectedError(f"{getattr(cls, MARK)} (read: {attribute})")


def _message(name: str, instead: str, why: str) -> str:
    return f"fairscale.{name} is not carried over: {why}. Use {instead} instead."


def _place(name: str) -> tuple[str, str]:
    """Path of the module under shardkit and the name within it."""
    module, _, short = name.rpartition(".")
    return f"shardkit.{module}" if module else "shardkit", short


def redirected(name: str, instead: str, *, why: str) -> type:
    """A class that stands at fairscale's path and raises when it (or a subclass) is instantiated.

    Args:
        name: its path below ``fairscale``, e.g. ``"nn.pipe.async_pipe.AsyncPipe"``.
        instead: what to take, as users would write it, e.g. ``"torch.distributed.pipelining.PipelineStage"``.
        why: the reason in half a sentence, without a full stop.
    """
    module, short = _place(name)
    message = _message(name, instead, why)

    def refuse(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise RedirectedError(message)

    namespace = {
        "__new__": refuse,
        "__module__": module,
        "__qualname__": short,
        "__doc__": message,
        MARK: message,
    }
    return _RedirectedMeta(short, (), namespace)


def redirected_function(name: str, instead: str, *, why: str) -> Callable[..., NoReturn]:
    """A function that stands at fairscale's path and raises when called; arguments as of :func:`redirected`."""
    module, short = _place(name)
    message = _message(name, instead, why)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RedirectedError(message)

    refuse.__name__, refuse.__qualname__, refuse.__module__, refuse.__doc__ = short, short, module, message
    setattr(refuse, MARK, message)
    return refuse


def redirected_names(module: str, names: Iterable[str], instead: str, *, why: str) -> Callable[[str], type]:
    """A module's ``__getattr__`` that has types and constants of redirected parts: importable, and no more::

    __getattr__ = redirected_names(__name__, ["ExcInfo"], "shardkit.nn.pipe.Pipe", why="it has no threads")
    """
    path = module.partition(".")[2]
    made = {name: redirected(f"{path}.{name}", instead, why=why) for name in names}

    def get(name: str) -> type:
        if name not in made:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return made[name]

    return get


def without_arguments(**gone: str) -> Callable[[_F], _F]:
    """Decorates a callable: these keyword arguments, which fairscale had once, are refused with what to do instead.

    Its signature stays as it is. An argument that is passed as None or False is dropped silently: it asked for nothing.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in gone.keys() & kwargs.keys():
                if kwargs.pop(name):
                    raise RedirectedError(f"{name}= is gone since fairscale 0.4.11: {gone[name]}")
            return function(*args, **kwargs)

        return cast(_F, checked)

    return decorate


def is_redirected(thing: object) -> bool:
    """Whether a class or function was made here (subclasses of users don't count)."""
    return MARK in getattr(thing, "__dict__", {})
