"""fairscale.nn.pipe.worker. Threads that issued the work of one device each."""

from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.stream import use_device, use_stream
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "Batch",
    "Task",
    "create_workers",
    "join_workers",
    "spawn_workers",
    "use_device",
    "use_stream",
    "worker",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.Pipe",
    "why": "one thread issues the cells of all devices, which do not wait for each other",
}

Task = redirected("nn.pipe.worker.Task", **_MOVED)
create_workers = redirected_function("nn.pipe.worker.create_workers", **_MOVED)
join_workers = redirected_function("nn.pipe.worker.join_workers", **_MOVED)
spawn_workers = redirected_function("nn.pipe.worker.spawn_workers", **_MOVED)
worker = redirected_function("nn.pipe.worker.worker", **_MOVED)

__getattr__ = redirected_names(__name__, ["ExcInfo"], **_MOVED)
