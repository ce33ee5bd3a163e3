"""``shardkit migrate``: files, exit statuses, and what is printed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from shardkit.tools import migration
from shardkit.tools.cli import main
from tests.started import output_of

BEFORE = "import fairscale.nn as fnn  # keep\nfnn.wrap\n"
AFTER = BEFORE.replace("fairscale", "shardkit")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("a.py", "pack/b.py", ".hidden/c.py", "env/lib/d.py", "pack/__pycache__/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BEFORE)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "pack" / "other.py").write_text("import torch\n")
    (tmp_path / "conf.yaml").write_text("_target_: fairscale.nn.wrap\n")
    return tmp_path


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def test_diff_and_check_write_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(project)
    assert main(["migrate", str(project), "--diff"]) == 0
    printed = capsys.readouterr().out
    assert f"--- a/{project}/a.py\n+++ b/{project}/a.py\n" in printed
    assert "-import fairscale.nn as fnn  # keep\n+import shardkit.nn as fnn  # keep\n" in printed
    assert f"{project}/conf.yaml:1: 'fairscale.nn.wrap' names fairscale\n" in printed
    assert printed.endswith("files to change: 2\n")
    assert main(["migrate", str(project), "--check"]) == 1
    assert "import" not in capsys.readouterr().out
    assert snapshot(project) == before


def test_torchs_fsdp1(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("from torch.distributed.fsdp import MixedPrecision\n")
    assert main(["migrate", str(path)]) == 0
    assert path.read_text().startswith("from torch.")
    assert main(["migrate", str(path), "--torch-fsdp"]) == 0
    assert path.read_text() == "from shardkit.torch_fsdp import MixedPrecision\n"


def test_lines_of_a_diff_are_those_of_patch() -> None:
    before = "import fairscale\r\n\x0c\nx = '\x85\u2028'"
    diff = migration.Migrated(Path("a.py"), before, before.replace("fairscale", "shardkit")).diff()
    assert diff.endswith(
        "@@ -1,3 +1,3 @@\n-import fairscale\r\n+import shardkit\r\n \x0c\n x = '\x85\u2028'\n"
        "\\ No newline at end of file\n"
    )


def test_it_rewrites_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(project), "--strings"]) == 0
    assert capsys.readouterr().out.endswith("files changed: 3\n")
    changed = {"a.py": AFTER, "pack/b.py": AFTER, "conf.yaml": "_target_: shardkit.nn.wrap\n"}
    for path in project.rglob("*.*"):
        if path.is_file() and path.name not in ("other.py", "pyvenv.cfg"):
            assert path.read_text() == changed.get(str(path.relative_to(project)), BEFORE), path
    after = snapshot(project)
    assert main(["migrate", str(project), "--strings", "--check"]) == 0
    assert main(["migrate", str(project), "--strings"]) == 0
    assert snapshot(project) == after


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("", "utf-8"),
        ("\ufeff", "utf-8"),
        ("# -*- coding: latin-1 -*-\r\n", "latin-1"),
        ("#!/usr/bin/python3\n", "utf-8"),
    ],
)
def test_encoding_line_ends_and_permissions_stay(tmp_path: Path, head: str, encoding: str) -> None:
    text = head + "name = 'J\u00fcrgen'\r\nimport fairscale as f # \u00e9\nf.nn\r\n\tif_ = 1".replace(
        "\r\n\tif_", "\n\nif_"
    )
    path = tmp_path / "real.py"
    path.write_bytes(text.encode(encoding))
    path.chmod(0o754)
    link = tmp_path / "link.py"
    link.symlink_to("real.py")
    assert main(["migrate", str(link)]) == 0
    assert path.read_bytes() == text.replace("fairscale", "shardkit").encode(encoding)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o754
    assert sorted(os.listdir(tmp_path)) == ["link.py", "real.py"]


@pytest.mark.parametrize(
    "data",
    [
        b"import fairscale\nprint 'x'\n",
        b"import fairscale # \xff\n",
        b"# coding: nonsense\nimport fairscale\n",
    ],
)
def test_what_cant_be_read_is_left_alone(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_bytes(data)
    good.write_text(BEFORE)
    assert main(["migrate", str(tmp_path)]) == 2
    assert bad.read_bytes() == data
    assert good.read_text() == AFTER
    printed = capsys.readouterr().out
    assert f"{bad}: left alone: it can't be read: " in printed
    assert printed.endswith("files changed: 1, left alone: 1\n")


def test_a_failed_write_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)

    def fail(*args: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        assert main(["migrate", str(path)]) == 2
    assert path.read_text() == BEFORE
    assert os.listdir(tmp_path) == ["a.py"]
    expected = f"{path}: left alone: it can't be written: disk full\nfiles changed: 0, left alone: 1\n"
    assert capsys.readouterr().out == expected


def test_what_changed_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    result = migration.migrate(path)
    path.write_text(BEFORE + "# saved in an editor\n")
    assert "it has changed since it was read" in str(result.written().error)
    assert path.read_text() == BEFORE + "# saved in an editor\n"
    assert os.listdir(tmp_path) == ["a.py"]
    path.unlink()
    assert result.written().error is not None
    assert os.listdir(tmp_path) == []


def test_only_files_of_the_folder_are_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe would wait for ever, a device do something, a link lead to somebody else's files."""
    project, outside = tmp_path / "project", tmp_path / "outside"
    project.mkdir()
    outside.mkdir()
    (project / "a.py").write_text(BEFORE)
    (project / "inside.py").symlink_to("a.py")
    (outside / "b.py").write_text(BEFORE)
    (project / "b.py").symlink_to(outside / "b.py")
    (project / "folder").symlink_to(outside)
    os.mkfifo(project / "pipe.py")
    os.mkfifo(project / "pipe.yaml")
    (project / "zero.py").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(project)  # such an address is short
        try:
            listening.bind("socket.py")
        finally:
            os.chdir(here)
        assert main(["migrate", str(project)]) == 0
    assert capsys.readouterr().out == "files changed: 1\n"
    assert (project / "a.py").read_text() == AFTER
    assert (outside / "b.py").read_text() == BEFORE
    for named in (project / "pipe.py", Path("/dev/zero")):
        assert main(["migrate", str(named)]) == 2
        assert capsys.readouterr().out.startswith(f"{named}: left alone: it is no regular file\n")
    assert main(["migrate", str(project / "b.py")]) == 0  # that is what was asked for
    assert (outside / "b.py").read_text() == AFTER


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="giving files away needs root")
def test_owners_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(BEFORE)
    path.chmod(0o4750)
    os.chown(path, 1234, 4321)
    path.chmod(0o4750)
    assert main(["migrate", str(path)]) == 0
    found = path.stat()
    assert (path.read_text(), found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (
        AFTER,
        1234,
        4321,
        0o4750,
    )


def test_links_to_nothing_and_data_are_no_obstacle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    (tmp_path / "data.json").write_text("fairscale " * 200_000)
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "gone.yaml").symlink_to("nowhere.yaml")
    assert main(["migrate", str(tmp_path)]) == 2
    assert (tmp_path / "a.py").read_text() == AFTER
    printed = capsys.readouterr().out
    assert "gone.py: left alone: it can't be read" in printed
    assert "json" not in printed
    assert "yaml" not in printed


def test_a_path_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    assert main(["migrate", str(tmp_path), str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text() == BEFORE


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    listed = capsys.readouterr().out
    assert "migrate" in listed
    assert "run-as-fairscale" in listed
    with pytest.raises(SystemExit) as end:
        main(["nonsense"])
    assert end.value.code == 2


def test_python_m_shardkit() -> None:
    assert output_of("-m", "shardkit", "migrate", "--check", __file__).endswith("files to change: 0\n")
