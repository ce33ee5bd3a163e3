"""Network interfaces of this machine, and what the libraries that send will make of them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import ERROR, WARNING, Finding

_SIOCGIFADDR = 0x8915
_NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interfaces() -> dict[str, dict[str, object]]:
    """Lists by name: address (IPv4), state, speed in Mbit/s (0: unknown), mtu."""
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
        is_prefix = variable.startswith(
            "NCCL"
        )  # a list of them, "=" for whole names, "^" for those that are not meant
        if is_prefix:
            value = "" if value.startswith("^") else value.lstrip("=").partition(",")[0].partition(":")[0]
        if not value:
            continue
        names = [n for n in known if n.startswith(value)] if is_prefix else [value]
        if not any(n in known for n in names):
            yield Finding(
                ERROR,
                f"{variable} is {environment[variable]}, and there is no such interface",
                f"name one of those with an address ({usable}), or unset it",
            )
        elif all(known[n]["state"] == "down" or not known[n]["address"] for n in names if n in known):
            yield Finding(
                ERROR,
                f"{variable} is {environment[variable]}, an interface that is down or has no address",
                f"name one of those with an address ({usable}), or bring it up: ip link set {value} up",
            )


def check_own_address(address: str, machines: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what gloo tells others of this machine: the address of its name, unless a variable says otherwise."""
    if machines < 2 or environment.get("GLOO_SOCKET_IFNAME"):
        return
    if not address or address.startswith("127."):
        what = (
            f"this machine's name stands for {address}" if address else "this machine's name has no address"
        )
        yield Finding(
            WARNING,
            f"{what}: gloo tells other machines an address at which they don't reach this one",
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface towards the others (shardkit run "
            "does so)",
        )
