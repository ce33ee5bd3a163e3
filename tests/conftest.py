"""Fixtures for all tests: pools end with the session, and no test may leave anything behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings

from shardkit import backend
from shardkit.backends.processes import RankPool
from tests.backends.streams_device import StreamsBackend
from tests.pools import DEVICE, XLA_FLAGS, ForkedPool, close_pools, free_port

# The same examples in every run, so that a change is judged and not its luck; ``make fuzz`` draws new ones.
settings.register_profile(
    "repeatable", derandomize="SHARDKIT_FUZZ" not in os.environ, database=None, deadline=None
)
settings.load_profile("repeatable")
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)  # for every process that a test starts
os.environ.setdefault("SHARDKIT_XLA_RULES", "tpu")  # what passes here is not to fail on a TPU
# Unbuffered, print() writes a line and its end one after the other, and the lines of ranks mix in a shared pipe.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["plain", "streams", "cuda"], default="plain",
        help="streams: gloo's and simulated ranks have a simulated device with streams; cuda: gloo's are on the first "
        "CUDA device",
    )  # fmt: skip

    parser.addoption("--support", metavar="FILE", help="counts tests by feature, backend and number of ranks")


def pytest_configure(config: pytest.Config) -> None:
    DEVICE["name"] = config.getoption("--device")
    backend._instances["streams"] = StreamsBackend()
    if config.getoption("--support"):
        from tests.support.recording import Recorder

        config.pluginmanager.register(Recorder(Path(config.getoption("--support"))))


def pytest_collection_finish() -> None:
    """Collections of garbage in tests look at what tests made, not at thousands of tests and at imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    close_pools()
    assert not multiprocessing.active_children(), "rank processes are left over"


@pytest.fixture(scope="module")
def fresh() -> Iterator[RankPool]:
    """A process that has not imported the real fairscale, as this one may have for other tests."""
    with ForkedPool(1) as pool:
        yield pool


@pytest.fixture
def port() -> int:
    """One that nobody listens on, where ranks may meet."""
    return free_port()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Environment variables, process groups and threads (pools of ranks are the session's)."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    names = {*environment, *os.environ} - {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    changed = {k for k in names if environment.get(k) != os.environ.get(k)}
    assert not changed, f"environment variables changed: {sorted(changed)}"
    assert not dist.is_initialized(), "a process group is left over in the test's own process"
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    if left:  # of a library's pool, which ends when nobody refers to it
        gc.collect()
        for thread in left:
            thread.join(5.0)
        left = [t for t in left if t.is_alive()]
    assert not left, f"threads are left over: {left}"
