"""The sources of torch_tpu: of a wheel (TORCH_TPU_WHEEL), or of the installed package."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import zipfile
from pathlib import Path

VARIABLE = "TORCH_TPU_WHEEL"
DEVICE_MODULE = "_internal/device/_device_module.py"


def missing() -> str:
    """Why there is nothing to read; empty: there is."""
    if os.environ.get(VARIABLE) or importlib.util.find_spec("torch_tpu") is not None:
        return ""
    return f"torch_tpu is not installed, and {VARIABLE} does not name its wheel (pip download --no-deps torch_tpu)"


@functools.cache
def _files() -> dict[str, Path | zipfile.Path]:
    """By name: below torch_tpu/, and what lies in the wheel's .dist-info as "METADATA" and "entry_points.txt"."""
    given = os.environ.get(VARIABLE)
    if given:
        archive = zipfile.ZipFile(given)
        found: dict[str, Path | zipfile.Path] = {}
        for name in archive.namelist():
            top, _, rest = name.partition("/")
            if top == "torch_tpu" or top.endswith(".dist-info"):
                found[rest] = zipfile.Path(archive, name)
        return found
    spec = importlib.util.find_spec("torch_tpu")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    info = next(package.parent.glob("torch_tpu-*.dist-info"))
    folders = {package: "**/*", info: "*"}
    return {
        str(path.relative_to(folder)): path for folder, what in folders.items() for path in folder.glob(what)
    }


def text(name: str) -> str:
    return _files()[name].read_text(encoding="utf-8")


@functools.cache
def native() -> bytes:
    """The compiled part for one version of torch: what it can say is in there."""
    versions = sorted(name for name in _files() if name.endswith("_common.so") and "libpywrap" in name)
    return _files()[versions[len(versions) // 2]].read_bytes()


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name))


def torch_alone_may_call() -> set[str]:
    """Names of torch.tpu whose callers outside of torch get an error."""
    found = set()
    for node in ast.walk(tree(DEVICE_MODULE)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
                "internal_or_experimental"
            ):
                words = {k.arg: ast.unparse(k.value) for k in decorator.keywords}
                if words["strict"] == "_STRICT_INTERNAL_DEVICE_APIS":
                    found.add(node.name)
    return found


def function(name: str, called: str) -> ast.FunctionDef:
    """A function or method, by its name."""
    return next(
        node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef) and node.name == called
    )


def calls(name: str, called: str) -> list[ast.Call]:
    """In the order of the file."""
    found = [
        node
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(called)
    ]
    return sorted(found, key=lambda call: call.lineno)
