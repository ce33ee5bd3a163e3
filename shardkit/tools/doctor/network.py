"""Network interfaces of this machine, what the libraries that send will make of them, and where machines meet."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...errors import ConfigurationError

ERROR, WARNING, NOTE = "error", "warning", "note"
_ORDER = (ERROR, WARNING, NOTE)


class Finding(NamedTuple):
    """One thing that is wrong, or will be.

    Attributes:
        level: :data:`ERROR`: jobs fail; :data:`WARNING`: they may, or are slow; :data:`NOTE`: good to know.
        what: is the case.
        do: about it.
        where: machine; "" for what concerns all.
    """

    level: str
    what: str
    do: str
    where: str = ""


def in_order(findings: list[Finding]) -> list[Finding]:
    """Sorts errors first; what several machines have is said once."""
    machines: dict[Finding, list[str]] = {}
    for finding in findings:
        machines.setdefault(finding._replace(where=""), []).append(finding.where)
    merged = [f._replace(where=", ".join(filter(None, dict.fromkeys(w)))) for f, w in machines.items()]
    return sorted(merged, key=lambda f: _ORDER.index(f.level))


_SIOCGIFADDR = 0x8915
_NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interfaces() -> dict[str, dict[str, object]]:
    """Lists by name address (IPv4), state, speed in Mbit/s (0: unknown), and mtu."""
    found = {}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        speed = _read(folder / "speed")
        found[name] = {
            "address": _address(name),
            "state": _read(folder / "operstate"),
            "speed": max(0, int(speed)) if re.fullmatch(r"-?\d+", speed) else 0,
            "mtu": int(_read(folder / "mtu") or 0),
        }
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the file is there, and has no answer while the interface is down
        return ""


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def own_name() -> tuple[str, str]:
    """Returns the machine's name, and the address that it stands for here ("": none)."""
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, ""


def machine_id() -> tuple[str, ...]:
    """Returns facts that differ on another machine or in another container: the name first."""
    ids = [socket.gethostname(), _read(Path("/proc/sys/kernel/random/boot_id"))]
    with contextlib.suppress(OSError):
        ids.append(os.readlink("/proc/self/ns/net"))
    return tuple(ids)


def check_names(
    known: Mapping[str, Mapping[str, object]], environment: Mapping[str, str]
) -> Iterator[Finding]:
    usable = ", ".join(sorted(n for n, facts in known.items() if facts["address"])) or "none"
    for variable in _NAMED_BY:
        value = environment.get(variable, "")
        is_prefix = variable.startswith("NCCL")
        if is_prefix:  # a list of them, "=" for whole names, "^" for those that are not meant
            value = "" if value.startswith("^") else value.lstrip("=").partition(",")[0].partition(":")[0]
        if not value:
            continue
        names = [n for n in known if n.startswith(value)] if is_prefix else [value]
        if not any(n in known for n in names):
            what = f"{variable} is {environment[variable]}, and there is no such interface"
            do = f"name one of those with an address ({usable}), or unset it"
            yield Finding(ERROR, what, do)
        elif all(known[n]["state"] == "down" or not known[n]["address"] for n in names if n in known):
            what = f"{variable} is {environment[variable]}, an interface that is down or has no address"
            do = f"name one of those with an address ({usable}), or bring it up: ip link set {value} up"
            yield Finding(ERROR, what, do)


def check_own_address(address: str, machines: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what gloo tells others of this machine: the address of its name, unless a variable says otherwise."""
    if machines < 2 or environment.get("GLOO_SOCKET_IFNAME"):
        return
    if not address or address.startswith("127."):
        what = f"this machine's name {f'stands for {address}' if address else 'has no address'}"
        yield Finding(
            WARNING,
            f"{what}: gloo tells other machines an address at which they don't reach this one",
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface towards the others (shardkit run "
            "does so)",
        )


# ------------------------------------------------------------ where machines meet
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
    """Says whether the address is this machine's and the port is free, so that it is here that others meet."""
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
    """Says whether a store of torch's answers there. What is no store may never answer the question."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=_ANSWER)
            store.check(["any"])
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
