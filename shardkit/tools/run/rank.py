"""A rank of a run: ``python -m shardkit.tools.run.rank train.py ...`` runs the program as ``__main__``.

What it adds: the exception that ends the program is written down for the page of failure, steps are counted, and the
rank says where it stands when it is asked. A thread waits for that, since the rank itself may stand in a collective;
where even this thread can't run (C code that holds the interpreter), a signal makes faulthandler write all stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import TracebackType

from ...launching.run_folder import Steps, write_at_once
from ...launching.started import end_with_parent

FILES = "SHARDKIT_RANK_FILES"  # environment variable: path of the rank's files, without their endings
PIPE = "SHARDKIT_RANK_PIPE"  # environment variable: a named pipe; who opens it asks where the rank stands
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) and signal.SIGRTMIN + 3  # one that programs don't use


def main() -> None:
    """Runs ``[-m] PROGRAM ARGUMENTS``."""
    is_module, files = sys.argv[1] == "-m", Path(os.environ[FILES])
    end_with_parent()
    _answer(files)
    _count_steps(files)
    del sys.path[0]  # where this module was found
    try:
        run_program(sys.argv[1 + is_module :], is_module)
    except Exception as error:  # noqa: BLE001 - raised again, with less of a traceback
        _write_down(error)
        raise error.with_traceback(_of_program(error.__traceback__)) from error.__cause__
    except SystemExit as error:
        _write_down(error)
        raise


def run_program(command: list[str], is_module: bool) -> None:
    """Runs a program with its arguments as ``__main__``; what it raises passes through."""
    program, sys.argv = command[0], command
    # in front, as Python does
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(program)))
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _count_steps(files: Path) -> None:
    """Counts steps of the first optimizer that makes one; there may be several."""
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = Steps(files.with_suffix(".steps"))
    first: list[weakref.ref[Optimizer]] = []

    def stepped(optimizer: Optimizer, *_: object) -> None:
        if not first or first[0]() is None:
            first[:] = [weakref.ref(optimizer)]
        if first[0]() is optimizer:
            steps.add()

    register_optimizer_step_post_hook(stepped)


# ------------------------------------------------------------------ errors
def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Leaves out what has run the program."""
    first = trace
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<frozen runpy") and not name.endswith("/runpy.py") and name != __file__:
            return trace
        trace = trace.tb_next
    return first


def _write_down(error: BaseException) -> None:
    """Writes in the format of torch's agent, with a time that tells who was first."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = traceback.format_exception(type(error), error, _of_program(error.__traceback__))
    extra = {"py_callstack": "".join(trace), "timestamp": str(int(time.time())), "time": time.time()}
    if not isinstance(error, SystemExit):
        sys.stderr.flush()
        extra["printed"] = os.fstat(2).st_size  # what comes now in the file is this traceback
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError):
        write_at_once(Path(path), json.dumps({"message": message}))


# ------------------------------------------------------------------ where it stands
def _answer(files: Path) -> None:
    if STACKS_SIGNAL:
        stacks = open(f"{files}.stacks", "w")  # noqa: SIM115 - as long as the process
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    pipe, me = os.environ.get(PIPE), threading.get_ident()
    if not pipe:
        return
    # now: when it is asked, the rank may be in the middle of an import
    report = importlib.import_module("shardkit.backends.diagnosis.stack_report")

    def answer_each() -> None:
        with contextlib.suppress(OSError):
            while True:
                with open(pipe, "rb") as asked:
                    asked.read()
                write_at_once(files.with_suffix(".where"), report.describe_thread(me))

    threading.Thread(target=answer_each, name="shardkit-where", daemon=True).start()


if __name__ == "__main__":
    main()
