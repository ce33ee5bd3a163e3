"""Addresses, interfaces and ports, as they matter to where machines meet."""

from __future__ import annotations

import contextlib
import datetime
import errno
import socket
import threading

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...errors import ConfigurationError
from ..doctor.network import interfaces

_ANSWER = datetime.timedelta(seconds=3)


def _parts(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--rdzv {rendezvous}: write HOST:PORT")
    return host, int(port)


def own_address(rendezvous: str) -> str:
    """Returns the address of this machine from which the way leads to where machines meet."""
    host, port = _parts(rendezvous)
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(target)  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"--rdzv {rendezvous}: {error}. No way leads there from here: check the name, and with 'ip route get' "
            "which interface it takes"
        ) from error


def can_host(rendezvous: str) -> bool:
    """Whether the address is this machine's and the port is free, so that it is here that others meet."""
    host, port = _parts(rendezvous)
    address = socket.gethostbyname(host)
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
            return True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another machine's address
                return False
    if not _is_store(host, port):
        raise ConfigurationError(
            f"--rdzv {rendezvous}: the port is taken by something else (ss -tlnp says by what); choose another one, "
            "the same on all machines"
        )
    return False  # another agent of this machine was here before


def _is_store(host: str, port: int) -> bool:
    """Whether a store of torch's answers there. What is no store may leave the question without an answer for ever."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=_ANSWER).check(
                ["any"]
            )
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_ANSWER.total_seconds())


def is_reachable(rendezvous: str) -> bool:
    try:
        socket.create_connection(_parts(rendezvous), _ANSWER.total_seconds()).close()
    except OSError:
        return False
    return True


def interface_of(address: str) -> str:
    """Returns the interface that has this address (IPv4); "" if unknown."""
    return next((name for name, facts in interfaces().items() if facts["address"] == address), "")
