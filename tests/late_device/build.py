"""Compiles the device, and other extensions of torch for tests: once for each torch and each source; about 15 s."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

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
    """The compiled device."""
    return compiled(_SOURCE, NAME)


def compiled(source: Path, name: str) -> Path:
    """An extension of torch, or for a file of C any library.

    Raises:
        RuntimeError: it does not compile.
    """
    text = source.read_bytes() + torch.__version__.encode() + sysconfig.get_platform().encode()
    key = hashlib.sha256(text + (sysconfig.get_config_var("SOABI") or "").encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardkit-tests"
    path = folder / f"{name}-{key}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:  # others may compile it at the same time
            _compile(source, name, Path(own) / path.name)
            os.replace(Path(own) / path.name, path)
    return path


def load(name: str, path: Path) -> Any:
    """The compiled extension as a module."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(source: Path, name: str, to: Path) -> None:
    flags = ["-O0", "-fPIC", "-shared"]
    libraries: list[str] = []
    if source.suffix != ".c":
        flags += ["-std=c++20", f"-DTORCH_EXTENSION_NAME={name}", f"-I{_TORCH}/include"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        flags += [f"-I{_TORCH}/include/torch/csrc/api/include", f"-I{sysconfig.get_paths()['include']}"]
        libraries = [
            f"-L{_TORCH}/lib",
            *(f"-l{name}" for name in ("torch_python", "torch_cpu", "torch", "c10")),
        ]
    compiler = "gcc" if source.suffix == ".c" else "g++"
    run = subprocess.run(
        [compiler, *flags, str(source), "-o", str(to), *libraries],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{run.stderr[-4000:]}")
