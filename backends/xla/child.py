"""The process that holds the replicas: takes jobs from its parent and sends results or the first error back."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from shardkit.types import AnyCallable, Args

from ..process_facts import memory

if TYPE_CHECKING:
    from .cpu_replicas import ReplicaState, World

# What goes back: ("ready", None), ("results", [bytes per rank]) or ("error", (rank, type, traceback)).


def serve(connection: multiprocessing.connection.Connection, world_size: int) -> None:
    """Entry point of the child process; never returns."""
    os.setpgid(0, 0)  # what programs start, data loaders' workers for one, ends with this process
    os.register_at_fork(
        after_in_child=connection.close
    )  # else they would hold it open when this process has died
    die_with_parent()
    try:
        world = start_world(world_size)
        connection.send(("ready", None))
        while True:
            connection.send(_work(world, connection.recv_bytes()))
    except EOFError:
        status = 0  # the parent closed its end
    except BaseException:  # noqa: BLE001 - the process ends here, and has nobody else to tell
        status = 1
        connection.send(("error", (0, *describe_error())))
    sys.stdout.flush()
    sys.stderr.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(status)  # threads may sit in a collective for ever; the interpreter's exit would join them


def start_world(size: int) -> World:
    """Makes the replicas of this process and routes its syncs through them. Once per process."""
    import torch._dynamo.config as compiling
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime

    from . import syncing, torch_xla_api
    from .cpu_replicas import make_world, ordinals

    world = make_world(size)
    syncing.install(world)
    torch_xla_api.install(world)

    def get_memory_info(device: object = None) -> dict[str, int]:
        # XLA has no figures on a CPU: a replica's share of what the process holds, and of the machine
        now, most, machine = (n // size for n in memory())
        return {"bytes_used": now, "bytes_limit": machine, "peak_bytes_used": most}

    xm.get_memory_info = get_memory_info
    # Each replica compiles as a process of its own would; torch keeps so many versions of a function in a process, and
    # runs it as written from then on. The first replicas would stop for compiling where the last ones do not.
    compiling.recompile_limit *= size
    compiling.accumulated_recompile_limit *= size
    if world.rules.pod:
        vars(torch_xla.runtime).update(ordinals(world.rules, size, lambda: world.here().rank))
    return world


def die_with_parent() -> None:
    """This process's group ends when its parent does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def describe_error() -> tuple[str, str]:
    """The class and the traceback of the error that is being handled."""
    kind = sys.exc_info()[0]
    return kind.__name__ if kind else "", traceback.format_exc()


def _work(world: World, job: bytes) -> tuple[str, object]:
    try:
        fn, args = pickle.loads(job)
    except Exception:  # noqa: BLE001 - whatever the caller's classes raise
        return "error", (0, *describe_error())
    world.renew()
    outcomes: queue.SimpleQueue[tuple[int, bytes | tuple[str, str]]] = queue.SimpleQueue()
    for state in world.states:
        threading.Thread(
            target=_replica, args=(state, fn, args, outcomes), name=f"replica-{state.rank}", daemon=True
        ).start()
    results: list[bytes] = [b""] * world.size
    for _ in range(world.size):
        rank, outcome = outcomes.get()
        if not isinstance(outcome, bytes):
            return "error", (rank, *outcome)  # at once: others may wait for this one in the runtime
        results[rank] = outcome
    return "results", results


def _replica(
    state: ReplicaState,
    fn: AnyCallable,
    args: Args,
    outcomes: queue.SimpleQueue[tuple[int, bytes | tuple[str, str]]],
) -> None:
    import torch_xla

    from .objects import pack

    world = state.world
    meeting, turns = (
        world.meeting,
        world.turns,
    )  # of this job: another one may begin as soon as the last result is there
    turns.take(state.rank)
    try:
        state.enter()
        result = fn(state.rank, *args)
        if state.calls:
            # Another replica may have read a result of these; this one has to take part.
            torch_xla.sync()
        data = pack(result, to_host=True)
        state.wait()
        outcomes.put((state.rank, data))
        meeting.leave(state.rank, "has finished its function")
    except BaseException as error:  # noqa: BLE001 - it is the caller's to judge
        outcomes.put((state.rank, describe_error()))  # first, so that it is the one reported
        meeting.leave(state.rank, f"failed with {type(error).__name__}: {error}", failed=True)
    finally:
        turns.give()
