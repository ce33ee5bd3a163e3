"""``shardkit.compat.install()``: unmodified programs and pickles get shardkit where they say fairscale."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import pkgutil
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit import compat, torch_fsdp, torch_fsdp2
from shardkit.backends.processes import RankPool
from shardkit.compat.redirections import REDIRECTED_MODULES
from shardkit.compat.reexports import MOVED
from shardkit.errors import LifecycleError
from shardkit.tools.cli import main
from tests.started import program, ran

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- modules and names
def all_modules() -> list[str]:
    found = []
    for part in sorted(compat.PARTS):
        package = importlib.import_module(f"shardkit.{part}")
        found += [package.__name__]
        found += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    # not all have a file
    return list(dict.fromkeys([*found, *(f"shardkit.{path}" for path in REDIRECTED_MODULES)]))


def every_module_is_shardkits(rank: int) -> None:
    ours = all_modules()
    functions = [getattr(importlib.import_module("shardkit.nn"), n) for n in ("auto_wrap", "wrap")]
    specs = {name: importlib.import_module(name).__spec__ for name in ours}
    for first in (ours, ours[::-1]):  # packages before what is in them, and the other way round
        with compat.installed():
            for name in first:
                theirs = importlib.import_module(name.replace("shardkit", "fairscale", 1))
                assert theirs is sys.modules[name], name
            import fairscale.nn

            assert [fairscale.nn.auto_wrap, fairscale.nn.wrap] == functions
            # Nothing was loaded a second time.
            again = {m.__name__ for m in list(sys.modules.values()) if m.__name__.startswith("fairscale.")}
            assert again == set(), again
        assert not [m for m in sys.modules if m.startswith("fairscale")]
    assert {name: sys.modules[name].__spec__ for name in ours} == specs
    assert len(ours) > 25


def test_every_module_is_shardkits(fresh: RankPool) -> None:
    fresh.run(every_module_is_shardkits)


def names_are_shardkits(rank: int) -> None:
    import shardkit.nn
    import shardkit.optim.oss

    with compat.installed():
        import fairscale
        import fairscale.nn.data_parallel.fully_sharded_data_parallel as deep
        import fairscale.optim.oss as module
        from fairscale.nn.misc import checkpoint_activations as old_path
        from fairscale.optim import OSS
        from fairscale.utils.testing import dist_init  # up to 0.4.6

        assert fairscale.optim.OSS is OSS is module.OSS is shardkit.optim.OSS
        assert fairscale.nn.FullyShardedDataParallel is shardkit.nn.FullyShardedDataParallel
        assert deep.FullyShardedDataParallel is shardkit.nn.FullyShardedDataParallel
        assert dist_init is shardkit.fair_dev.testing.testing.dist_init
        assert old_path is shardkit.nn.misc.checkpoint_activations
        assert isinstance(
            shardkit.optim.OSS([torch.nn.Parameter(torch.zeros(2))], lr=1.0), fairscale.optim.OSS
        )
        stars: dict[str, Any] = {}
        exec("from fairscale.nn import *\nfrom fairscale.optim.oss import *", stars)
        assert stars["FullyShardedDataParallel"] is shardkit.nn.FullyShardedDataParallel
        assert stars["OSS"] is OSS
        # What is patched on one side is patched on the other.
        fairscale.nn.patched = 3
        assert shardkit.nn.patched == 3
        del shardkit.nn.patched
    assert isinstance(OSS, type)  # what was imported stays


def test_names_are_shardkits(fresh: RankPool) -> None:
    fresh.run(names_are_shardkits)


def versions(rank: int) -> None:
    before = find_real()
    with compat.installed():
        import fairscale
        from fairscale.version import __version_tuple__

        assert fairscale.__version__ == "0.4.13"
        assert fairscale.__version_tuple__ == __version_tuple__ == (0, 4, 13)
        assert importlib.metadata.version("fairscale") == "0.4.13"
        assert importlib.metadata.metadata("fairscale")["Summary"] == "served by shardkit"
        assert "fairscale" in {d.metadata["Name"] for d in importlib.metadata.distributions()}
        assert torch.__version__.startswith(importlib.metadata.version("torch"))
        for name in ("fairscale", "fairscale.nn", "fairscale.nn.checkpoint"):
            assert importlib.util.find_spec(name) is not None
    assert find_real() == before


def find_real() -> str | None:
    try:
        return importlib.metadata.metadata("fairscale")["Summary"]
    except importlib.metadata.PackageNotFoundError:
        return None


def test_it_has_fairscales_version(fresh: RankPool) -> None:
    fresh.run(versions)


def what_is_missing(rank: int) -> None:
    with compat.installed():
        import fairscale

        # "oss" and "fsdp" are shardkit's own modules, none of fairscale's
        for name in ("fairscale.oss", "fairscale.fsdp", "fairscale.nn.no_such", "fairscale.no_such.at_all"):
            with pytest.raises(
                ModuleNotFoundError, match="shardkit, which stands in for fairscale, has no"
            ) as error:
                importlib.import_module(name)
            assert error.value.name == (name.rpartition(".at")[0] or name)
        for name in ("oss", "launch", "no_such"):
            with pytest.raises(AttributeError):
                getattr(fairscale, name)
        with pytest.raises(ImportError, match="no_such"):
            exec("from fairscale.nn import no_such")


def test_what_is_missing_is_an_import_error(fresh: RankPool) -> None:
    fresh.run(what_is_missing)


def after_another(rank: int, folder: str) -> str:
    sys.path.insert(0, folder)
    try:
        import fairscale

        assert fairscale.real
        with pytest.raises(LifecycleError) as error:
            compat.install()
        assert not compat.is_installed()
        return str(error.value)
    finally:
        sys.path.remove(folder)
        del sys.modules["fairscale"]


def test_it_refuses_once_fairscale_is_imported(fresh: RankPool, tmp_path: Path) -> None:
    (tmp_path / "fairscale.py").write_text("real = True\n")
    (message,) = fresh.run(after_another, str(tmp_path))
    assert str(tmp_path / "fairscale.py") in message
    assert "before the first import" in message


def twice(rank: int) -> None:
    with compat.installed():
        import fairscale

        compat.install()
        with compat.installed():
            pass
        assert compat.is_installed()
        assert sys.modules["fairscale"] is fairscale
        assert sum(type(f).__module__ == "shardkit.compat" for f in sys.meta_path) == 1
    assert not compat.is_installed()
    compat.uninstall()


def test_twice_is_once(fresh: RankPool) -> None:
    fresh.run(twice)


# ---------------------------------------------------------------- pickles
def pickles(rank: int) -> None:
    import shardkit.nn.misc.flatten_params_wrapper as ours

    for name, expected in {
        "nn.misc.flatten_params_wrapper FlatParameter": ours.FlatParameter,
        "nn.misc.flatten_params_wrapper _post_state_dict_hook": ours._post_state_dict_hook,
        "optim.oss OSS": importlib.import_module("shardkit.optim.oss").OSS,
    }.items():
        named = b"cfairscale.%s\n." % name.replace(" ", "\n").encode()  # as of protocol 0
        with compat.installed():
            assert pickle.loads(named) is expected


def test_pickles_find_shardkits_classes(fresh: RankPool) -> None:
    fresh.run(pickles)


# ---------------------------------------------------------------- programs
PROGRAM = program("fairscale_in_children")


def test_a_script_and_the_processes_it_starts(tmp_path: Path) -> None:
    script = shutil.copy(PROGRAM, tmp_path / "train.py")  # in a folder where nothing else is
    done = ran("-m", "shardkit", "run-as-fairscale", str(script), "--lr", "1", "-m", "--", "x")
    assert done.returncode == 7, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # up to torch 2.9
    assert lines == ["['--lr', '1', '-m', '--', 'x']", "child", "child"]


def module_by_command(rank: int, folder: str) -> list[str]:
    before, argv, path = os.getcwd(), sys.argv, list(sys.path)
    os.chdir(folder)
    try:
        assert main(["run-as-fairscale", "-m", "pack.train", "--lr", "1"]) == 0
        assert main(["run-as-fsdp1", "-m", "pack.as_torchs"]) == 0
        torch_fsdp.uninstall()
        first = Path("torchs").read_text().split()
        assert main(["run-as-fsdp2", "-m", "pack.as_torchs"]) == 0
        return [*Path("seen").read_text().split(), *first, *Path("torchs").read_text().split()]
    finally:
        os.chdir(before)
        sys.argv, sys.path[:] = argv, path
        compat.uninstall()
        torch_fsdp2.uninstall()
        assert not torch_fsdp.is_installed()
        assert not torch_fsdp2.is_installed()


def test_a_module_with_its_arguments(fresh: RankPool, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text(
        textwrap.dedent("""
        import sys
        from fairscale.optim import OSS
        from . import other
        open("seen", "w").write(" ".join([__name__, OSS.__module__, other.HERE, *sys.argv[1:]]))
        """)
    )
    (tmp_path / "pack" / "other.py").write_text("HERE = __package__\n")
    (tmp_path / "pack" / "as_torchs.py").write_text(
        textwrap.dedent("""
        from multiprocessing.spawn import get_preparation_data
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        in_children = get_preparation_data("x")["shardkit.compat"].__reduce__()[1][0]
        served = [FullyShardedDataParallel.__module__, fully_shard.__globals__['__name__']]
        open("torchs", "w").write(" ".join([*served, str("torch_fsdp" in in_children)]))
        del FullyShardedDataParallel, fully_shard
        """)
    )
    found = fresh.run(module_by_command, str(tmp_path))[0]
    assert found[:5] == ["__main__", "shardkit.optim", "pack", "--lr", "1"]
    ours = ["shardkit.torch_fsdp.fully_sharded_data_parallel", "shardkit.torch_fsdp.fsdp2"]
    assert (found[5], found[7], found[9:]) == (ours[0], "True", [ours[1], "True"])
    assert [name.partition(".")[0] for name in (found[6], found[8])] == ["torch", "torch"]


# ------------ What 0.2.0 let one import can be imported: names of ``shardkit``, of pages, and of the modules
# of compat/.
# ``public_names_0_2.txt`` has a module a line, with its names; some are modules themselves. It is as 0.2.0 printed it.
LINES = (Path(__file__).parent / "public_names_0_2.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(":")[0])
def test_names_of_the_last_release(line: str) -> None:
    path, _, names = line.partition(":")
    module = importlib.import_module(path)
    for name in names.split():
        if not hasattr(module, name) and (
            f"{path}.{name}" != "shardkit.xla.xla_backend" or find_spec("torch_xla")
        ):
            importlib.import_module(f"{path}.{name}")


@pytest.mark.parametrize("old", MOVED)
def test_moved_modules_are_the_same_objects(old: str) -> None:
    before, now = (importlib.import_module(f"shardkit.{path}") for path in (old, MOVED[old]))
    assert before is now


def test_what_is_below_a_moved_package_moves_along() -> None:
    from shardkit.testing.fairscale_ranks import NoStream
    from shardkit.tools.verify import fairscale_ranks

    assert NoStream is fairscale_ranks.NoStream
