"""A network of one's own: every byte that ranks send over loopback is counted by the kernel."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1


def enter_private_network() -> str:
    """Moves this process, and those it starts from now on, into a new network with a loopback device only.

    Call it before threads start.

    Returns:
        "" or why it can't be done here (it takes root, or a kernel that allows user namespaces).
    """
    if not hasattr(os, "fork") or not os.path.exists("/proc/self/ns/net"):
        return "no network namespaces on this system"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET) != 0 and libc.unshare(_NEW_USER | _NEW_NET) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            fcntl.ioctl(s, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))
    except OSError as error:
        return f"loopback can't be brought up: {error}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return ""


def throttle(rate: str) -> str:
    """Limits this network's loopback, which all ranks share, to a rate in tc's words, such as "2gbit".

    Returns:
        "" or why it can't be done here.
    """
    bucket = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
    try:
        done = subprocess.run(
            ["tc", "qdisc", "replace", "dev", "lo", "root", *bucket],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"tc (of iproute2): {error}"
    return done.stderr.strip()


def loopback_bytes() -> int:
    """Bytes sent over this network's loopback so far."""
    with open("/proc/self/net/dev") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name.strip() == "lo":
                return int(rest.split()[8])
    raise OSError("no loopback device in /proc/self/net/dev")
