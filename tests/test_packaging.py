"""backends/ and compat/ are top-level folders but sub-packages of shardkit: links, folders and wheel agree."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.started import output_of, ran

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = {
    f"shardkit.{e.name}": os.path.relpath(e.resolve(), ROOT)
    for e in (ROOT / "shardkit").iterdir()
    if e.is_symlink()
}
FOLDERS = ("shardkit", "backends", "compat")


def package_of(folder: Path) -> str:
    """Name under which a folder with an ``__init__.py`` is imported, by the links."""
    relative = folder.relative_to(ROOT).as_posix()
    for package, mapped in {**LINKS, "shardkit": "shardkit"}.items():
        if relative == mapped:
            return str(package)
        if relative.startswith(mapped + "/"):
            return f"{package}.{relative[len(mapped) + 1 :].replace('/', '.')}"
    pytest.fail(f"no link in shardkit/ leads to {relative}")


def real_files() -> dict[str, Path]:
    """Every module's path within the wheel and the file it comes from; links are not followed."""
    files = {}
    for top in FOLDERS:
        for directory, _, names in os.walk(ROOT / top, followlinks=False):
            for name in names:
                if name.endswith(".py") or name == "py.typed":
                    path = Path(directory, name)
                    files[f"{package_of(path.parent).replace('.', '/')}/{name}"] = path
    return files


@pytest.fixture(scope="module")
def copy_of_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds leave files behind; they do it here, not in the checkout."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(copy_of_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy_of_sources))
    (built,) = out.glob("*.whl")
    return built


def run_pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr


def run_python(code: str, cwd: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that sees ``paths`` and what is installed, but no editable installation.

    Those come from .pth files, which ``-S`` leaves unread; and the folder it is run from is not searched.
    """
    search = [str(p) for p in paths]
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    code = f"import sys; sys.path[:] = {search!r} + [p for p in sys.path if p] + {installed!r}\n{code}"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=400
    )


def packages() -> list[str]:
    """Names of all packages."""
    return sorted({package_of(path.parent) for path in real_files().values()})


def test_links_are_relative_and_all_packages_have_an_init() -> None:
    for name in LINKS:
        target = os.readlink(ROOT / name.replace(".", "/"))
        assert not os.path.isabs(target), f"{name} is an absolute link; it has to be relative"
    for package in packages():
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), f"{package} has no __init__.py"


def test_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
        metadata = next(archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA"))
    assert inside == {name: path.read_bytes() for name, path in real_files().items()}
    assert "License-Expression: BSD-3-Clause" in metadata
    required = [r for r in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M) if "extra ==" not in r]
    assert required == ["torch>=2.9"]


def test_wheel_imports_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run_pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    assert sorted(p.name for p in target.iterdir() if not p.name.endswith(".dist-info")) == [
        "bin",
        "shardkit",
    ]
    assert [p.name for p in (target / "bin").iterdir()] == ["shardkit"]  # the command
    code = f"""
import importlib
for name in {packages()!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(target)!r}), module.__file__
"""
    result = run_python(code, tmp_path, target)
    assert result.returncode == 0, result.stderr


def test_editable_installation_imports_the_checkout(copy_of_sources: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run_pip(
        *("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)),
        *("--editable", str(copy_of_sources)),
    )
    code = f"""
import importlib, importlib.util, site
site.addsitedir({str(site)!r})
for name in {packages()!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(copy_of_sources)!r}), module.__file__
for name in ("backends", "compat"):
    assert importlib.util.find_spec(name) is None, name
"""
    # Searched first: an environment that has shardkit installed holds a finder of the same name.
    result = run_python(code, tmp_path, site)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["backends", "compat"])
def test_generic_names_are_not_importable_elsewhere(name: str, tmp_path: Path) -> None:
    result = run_python(f"import {name}", tmp_path)
    assert "ModuleNotFoundError" in result.stderr, result.stdout + result.stderr


def test_a_module_has_one_identity() -> None:
    """Reached through a link, a module still belongs to shardkit: classes compare equal everywhere."""
    code = """
import shardkit.backend, shardkit.backends.gloo as gloo, sys
assert gloo.__name__ == "shardkit.backends.gloo"
twice = [name for name in sys.modules if name.split(".")[0] in ("backends", "compat")]
assert not twice, twice
"""
    result = run_python(code, ROOT, ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", sorted(real_files()))
def test_every_module_says_what_it_is(name: str) -> None:
    path = real_files()[name]
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no docstring"


def test_version_is_said_once() -> None:
    import shardkit

    assert getattr(shardkit, "__version__", PROJECT["project"]["version"]) == PROJECT["project"]["version"]


def test_names_are_loaded_when_they_are_asked_for() -> None:
    program = """
import sys, shardkit
print(len([m for m in sys.modules if m.partition(".")[0] == "shardkit"]), "torch" in sys.modules)
assert dir(shardkit) == shardkit.__all__
assert not hasattr(shardkit, "nothing")
assert len(shardkit.__all__) == 30 and set(shardkit.__all__) <= set(shardkit._HOME_OF)
missing = [n for n in shardkit._HOME_OF if not hasattr(shardkit, n)]
assert not missing, missing
import shardkit.launching, shardkit.tools.summaries
assert callable(shardkit.launch) and callable(shardkit.summary) and shardkit.nn.Pipe and shardkit.pipeline
"""
    modules, has_torch = output_of("-c", program).split()
    assert int(modules) <= 10
    assert has_torch == "False"


def test_type_checkers_see_the_same_names() -> None:
    import shardkit

    (block,) = [n for n in ast.parse(Path(shardkit.__file__).read_text()).body if isinstance(n, ast.If)]
    seen = {(a.asname, n.module) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == set(shardkit._HOME_OF.items())


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--help"], 0, "runs a program on ranks"),
        (["run", "--help"], 0, "--stuck-after SECONDS"),
        (["--version"], 0, f"shardkit {PROJECT['project']['version']}\n"),
        (["rnu", "train.py"], 2, "rnu: did you mean run?"),
        (["ckpt", "covnert"], 2, "covnert: did you mean convert?"),
    ],
)
def test_the_command_line_answers_without_torch(arguments: list[str], status: int, says: str) -> None:
    import resource

    program = "import sys; sys.modules['torch'] = None; from shardkit.tools.cli import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = ran("-c", program, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, says in done.stdout + done.stderr) == (status, True), done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_the_api_page_has_every_public_name() -> None:
    import shardkit

    page = (ROOT / "docs" / "api.md").read_text()
    directives = set(re.findall(r"^\.\. auto\w+:: (?:[\w.]+\.)?(\w+)$", page, re.M))
    assert {
        n for n in shardkit._HOME_OF if getattr(shardkit, n).__module__ != "shardkit.errors"
    } <= directives
