"""Programs that ranks run: a script, a module, or a function."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from unittest import mock

import torch
import torch.distributed as dist

from shardkit.errors import ConfigurationError
from shardkit.types import Args, Kwargs, Tree

from .ranks import Rank, current
from .surroundings import named_main

_FRESH_SEED = 67280421310721  # what torch's generator has in a new process


class Program:
    """A script of a file, or a module with ``is_module``."""

    def __init__(self, name: str, is_module: bool, arguments: Sequence[str]) -> None:
        self.name, self._arguments = name, list(arguments)
        self._spec: Tree = None
        self._first = os.getcwd()
        if is_module:
            self._file, self._code = self._find_module(name)
            return
        path = Path(name)
        if not path.is_file():
            raise ConfigurationError(f"{name}: no such script; with -m, a module's name")
        self._file, self._first = str(path), str(path.resolve().parent)
        try:
            self._code = compile(path.read_bytes(), self._file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise ConfigurationError(f"{name} is no Python: {error}") from error

    def _find_module(self, name: str) -> tuple[str, CodeType]:
        with mock.patch.object(sys, "path", [self._first, *sys.path]):
            try:
                self._spec = importlib.util.find_spec(name)
                if self._spec is not None and self._spec.submodule_search_locations is not None:
                    self._spec = importlib.util.find_spec(f"{name}.__main__")
                code = None if self._spec is None else self._spec.loader.get_code(self._spec.name)
            except ImportError as error:
                raise ConfigurationError(f"module {name} can't be found: {error}") from error
        if code is None:
            raise ConfigurationError(f"module {name} can't be found, or has no Python source")
        return str(self._spec.origin), code

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        with mock.patch.object(sys, "argv", [self._file, *self._arguments]):
            with mock.patch.object(sys, "path", [self._first, *sys.path]):
                yield

    def run(self, rank: Rank) -> None:
        """In the rank's thread."""
        package = None if self._spec is None else self._spec.parent
        module = named_main(rank, self._file, package, self._spec)
        try:
            exec(self._code, module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ConfigurationError(f"the script ended itself with status {end.code}") from end


class RankFunction:
    """``fn(rank)``, with a default process group."""

    def __init__(self, fn: Callable[[int], object]) -> None:
        self._fn, self.name = fn, getattr(fn, "__name__", "function")

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        yield

    def run(self, rank: Rank) -> object:
        """In the rank's thread."""
        dist.init_process_group("gloo")
        return self._fn(rank.number)


def begin_as_new_process(rank: int) -> None:
    """Random generators are as a new process has them: torch's the same on all ranks, others not."""
    torch.default_generator.manual_seed(_FRESH_SEED)
    random.seed(f"rank {rank}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)


def spawning(outside: Callable[..., Tree]) -> Callable[..., Tree]:
    """``torch.multiprocessing.spawn``: a rank that starts W ranks goes on as one of them."""

    def spawn(
        fn: Callable[..., object], args: Args = (), nprocs: int = 1, *more: object, **kwargs: object
    ) -> Tree:
        rank = current()
        if rank is None:
            return outside(fn, args, nprocs, *more, **kwargs)
        if nprocs != rank.world_size:
            raise ConfigurationError(
                f"the script spawns {nprocs} processes, and the rehearsal has {rank.world_size} ranks; rehearse with "
                f"--ranks {nprocs}, or let the script spawn as many"
            )
        fn(rank.number, *args)
        return _Joined()

    return spawn


class _Joined:
    """Stands for the result of ``spawn(join=False)``: processes that have ended."""

    def join(self, *args: object, **kwargs: Kwargs) -> bool:
        return True
