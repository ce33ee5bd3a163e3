"""``shardkit ckpt``: what it prints, and its exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardkit.tools.cli import main
from tests.checkpoint_tools.samples import everything, make
from tests.started import output_of, ran


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Two complete steps and one that is not."""
    source = make("shardkit", tmp_path)
    folder = tmp_path / "steps"
    for step in (2, 10):
        shutil.copytree(source, folder / f"step-{step:08d}")
    shutil.copytree(source, folder / "step-00000011")
    (folder / "step-00000011" / "shardkit.json").unlink()
    (folder / "notes").mkdir()
    return folder


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, object]:
    status = main(["ckpt", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_ls(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = _json(capsys, "ls", str(steps))
    assert status == 0
    assert isinstance(rows, list)
    assert [(r["step"], r["problem"]) for r in rows] == [
        (2, None),
        (2, "its shardkit.json is of step 2"),  # a copy under another name
        (11, "incomplete: it has no shardkit.json"),
    ]
    data = steps / "step-00000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    assert main(["ckpt", "ls", str(steps)]) == 0
    text = capsys.readouterr().out
    assert "__0_0.distcp has" in text
    assert "incomplete" in text


def test_show(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder of steps, the last complete one."""
    status, found = _json(capsys, "show", str(steps))
    assert status == 0
    assert isinstance(found, dict)
    assert found["path"].endswith("step-00000010")
    tensors = {t["name"]: t for t in found["tensors"]}
    assert tensors["model.hidden.weight"] == {
        "name": "model.hidden.weight", "shape": [7, 6], "dtype": "float32", "bytes": 168, "parts": 1,
    }  # fmt: skip
    assert found["model"]["tensors"] == len(everything()["model"])
    (group,) = found["param_groups"]
    assert (group["lr"], group["params"]) == (0.01, 9)
    assert found["values"]["extra.seen"] == "[3, 4]"
    assert main(["ckpt", "show", str(steps)]) == 0
    text = capsys.readouterr().out
    assert "param group 0: 9 parameters, lr=0.01" in text
    assert "model.hidden.weight" in text


def test_verify(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", str(steps)]) == 0
    assert capsys.readouterr().out.count("as written") == 2
    data = steps / "step-00000010" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["ckpt", "verify", str(steps)]) == 1
    assert "__0_0.distcp (optimizer.state." in capsys.readouterr().out
    status, found = _json(capsys, "verify", str(steps))
    assert status == 1
    assert isinstance(found, list)
    assert [len(f["damages"]) for f in found] == [0, 1]


def test_diff(steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = everything()
    state["model"]["hidden.weight"] = state["model"]["hidden.weight"].clone()
    state["model"]["hidden.weight"][1, 2] += 0.25
    state["model"]["out.bias"] = state["model"]["out.bias"].double()
    state["model"]["scale"] = state["model"]["scale"].view(1)
    state["model"]["added"] = torch.ones(1)
    state["model"]["norm.bias"] = state["model"]["norm.bias"].fill_(float("nan"))
    torch.save(state, tmp_path / "other")
    torch.save(everything()["model"], tmp_path / "bare")
    status, found = _json(capsys, "diff", str(steps), str(tmp_path / "other"), "--model-only")
    assert status == 1
    assert isinstance(found, dict)
    whats = {d["name"]: (d["what"], d["max_abs"]) for d in found["differences"]}
    assert whats.pop("model.hidden.weight") == ("1 of 42 elements, max. 0.25", 0.25)
    assert whats.pop("model.out.bias") == ("dtypes float32 and float64, values are equal", 0.0)
    assert whats.pop("model.scale")[0] == "shapes [] and [1]"
    assert whats.pop("model.added")[0] == f"only in {tmp_path / 'other'}"
    assert whats.pop("model.norm.bias") == ("7 of 7 elements, max. nan", "nan")
    assert whats == {}
    assert main(["ckpt", "diff", str(steps), str(tmp_path / "bare")]) == 0
    text = capsys.readouterr().out
    assert "not compared: optimizer, step, extra" in text
    assert "all the same" in text
    first = str(steps / "step-00000002")
    assert main(["ckpt", "diff", str(steps), first]) == 0


def test_errors_are_one_line(steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["show", str(tmp_path / "nothing")], "there is no"),
        (["show", str(steps / "notes")], "is no checkpoint"),
        (["verify", str(steps / "notes")], "is no checkpoint"),
        (["convert", str(steps), str(tmp_path / "x"), "--to", "hf", "--dtype", "int8"], "--dtype int8"),
        (["convert", str(steps), str(steps / "notes"), "--to", "hf"], "is there already"),
        (["convert", str(steps), str(tmp_path / "x"), "--to", "hf", "--tied", "a"], "NAME=OTHER"),
        (["show", str(steps), "--model-key", "weights"], "has no 'weights'"),
    ]
    for arguments, words in cases:
        assert main(["ckpt", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    convert = ["ckpt", "convert", str(steps), str(tmp_path / "x"), "--to", "hf", "--max-shard-size"]
    for size in ("5 apples", "1.2.3", ".", "", "0", "0.1", "-3"):
        with pytest.raises(SystemExit):
            main([*convert, size])
        assert f"--max-shard-size: {size}: write it as" in capsys.readouterr().err


def test_convert(steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, as it is called."""
    target = str(tmp_path / "out")
    command = ["-m", "shardkit", "ckpt", "convert", str(steps), target, "--to", "hf"]
    result = ran(*command, "--json")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    done = json.loads(result.stdout)
    assert done["source"].endswith("step-00000010")
    assert any("optimizer" in note for note in done["notes"])
    result = ran(*command)
    assert result.returncode == 2
    assert "--overwrite" in result.stderr
    assert "no config.json" in output_of(*command, "--overwrite")
    assert main(["ckpt", "diff", str(steps), target]) == 0
