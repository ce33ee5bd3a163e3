"""Compiles the device: once for each torch and each source; about 15 s."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

NAME = "shardkit_late_device"
_SOURCE = Path(__file__).with_name("device.cpp")
_TORCH = Path(torch.__file__).parent


def missing() -> str:
    """What the device can't be compiled for; empty: nothing."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        return "its operations are those of torch 2.11 and newer, as TorchTPU's are"
    if shutil.which("g++") is None:
        return "there is no C++ compiler (g++)"
    if not (_TORCH / "include/ATen/ATen.h").is_file():
        return "this torch has no headers"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "this Python has no headers"
    return ""


@functools.cache
def library() -> Path:
    """The compiled device.

    Raises:
        RuntimeError: it does not compile.
    """
    text = _SOURCE.read_bytes() + torch.__version__.encode() + sysconfig.get_platform().encode()
    key = hashlib.sha256(text + (sysconfig.get_config_var("SOABI") or "").encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardkit-tests"
    path = folder / f"{NAME}-{key}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # others may compile it at the same time
            _compile(Path(own) / path.name)
            os.replace(Path(own) / path.name, path)
    return path


def _compile(to: Path) -> None:
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}", f"-I{_TORCH}/include"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    flags += [f"-I{_TORCH}/include/torch/csrc/api/include", f"-I{sysconfig.get_paths()['include']}"]
    libraries = [f"-L{_TORCH}/lib", *(f"-l{name}" for name in ("torch_python", "torch_cpu", "torch", "c10"))]
    run = subprocess.run(
        ["g++", *flags, str(_SOURCE), "-o", str(to), *libraries], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(f"the device does not compile:\n{run.stderr[-4000:]}")
