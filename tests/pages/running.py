"""Runs a page's blocks in order, as a reader does who copies them into one file.

``python`` blocks are one program, train.py, whose ``shardkit.launch`` uses the session's ranks. ``shardkit`` commands
in ``console`` blocks are run too. What a ``text`` block shows has to be what was printed since the last one, with
``...`` for anything. Other blocks (``diff``, ``sh``) are for reading.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardkit
from shardkit.tools.cli import main
from tests.pools import rank_pool

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_THREADS = ("simulated", "streams")  # ranks of these backends are here already
_launch = shardkit.launch


@dataclass(frozen=True)
class Block:
    """A block of a page, with the line of its first one."""

    kind: str
    text: str
    line: int

    def execute(self, names: dict[str, Any]) -> None:
        """Python; tracebacks name the page's lines."""
        exec(compile("\n" * (self.line - 1) + self.text, "train.py", "exec"), names)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in _BLOCK.finditer(text)]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Files and the environment stay here."""
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def _on_rank(rank: int, page: Path, until: int, name: str, folder: Path, args: Any) -> tuple[Any, str]:
    """The function of that name, in a rank that has imported the program as far as it went; and what was printed."""
    module = type(sys)("page")
    sys.modules["page"] = module
    printed = io.StringIO()
    with contextlib.ExitStack() as until_returned:
        if threading.current_thread() is threading.main_thread():  # a process of its own, and no replica
            until_returned.enter_context(inside(folder))
            until_returned.enter_context(contextlib.redirect_stdout(printed))
        for block in blocks_of(page)[:until]:
            if block.kind == "python":
                block.execute(module.__dict__)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
        return found(rank, *args), printed.getvalue()


def show(found: str, expected: str, page: Path, line: int) -> None:
    """Compares words; ``...`` stands for anything."""
    wanted = ".*?".join(re.escape(part.strip()) for part in " ".join(expected.split()).split("..."))
    same = re.search(wanted.replace(r"\ ", " "), " ".join(found.split()))
    assert same, f"{page.name}:{line} shows\n{expected}\nwhere the program prints\n{found}"


def run_page(page: Path, folder: Path, backend: str = "gloo") -> dict[str, Any]:
    """Runs it in ``folder``; returns the names that it leaves.

    Args:
        backend: of ``launch`` where the page says none.
    """
    blocks = blocks_of(page)
    at = 0
    printed = io.StringIO()

    def launch(
        fn: Callable[..., Any], world_size: int, *, backend: str = backend, args: Any = (), **limits: Any
    ) -> list[Any]:
        if backend in _THREADS:
            return _launch(fn, world_size, backend=backend, args=args, **limits)
        pool = rank_pool(world_size, backend)
        answers = pool.run(_on_rank, page, at + 1, fn.__qualname__, Path.cwd(), args)
        print("".join(text for _, text in answers), end="")
        return [result for result, _ in answers]

    module = type(sys)("__main__")
    shown = 0
    shardkit.launch = launch
    try:
        with inside(folder), contextlib.redirect_stdout(printed):
            for at, block in enumerate(blocks):
                if block.kind == "python":
                    block.execute(module.__dict__)
                elif block.kind == "console":
                    program = "\n".join(b.text for b in blocks[:at] if b.kind == "python")
                    Path("train.py").write_text(program)
                    _commands(block.text)
                elif block.kind == "text":
                    show(printed.getvalue()[shown:], block.text, page, block.line)
                    shown = len(printed.getvalue())
    finally:
        shardkit.launch = _launch
    return dict(module.__dict__)


def _commands(text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["shardkit"]:
            status = main(words[1:])
            assert status == int("# exit status 1" in line), f"{line}: exit status {status}"
