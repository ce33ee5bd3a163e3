"""Imports of fairscale become shardkit's, and nothing else changes."""

from __future__ import annotations

import textwrap

import pytest

from shardkit.tools.migration import rewrite, rewrite_text


def migrated(source: str, **options: bool) -> str:
    result = rewrite(textwrap.dedent(source), **options).source
    assert rewrite(result, **options).source == result
    return result


def said(source: str, **options: bool) -> list[tuple[int, str]]:
    return [(n.line, n.text) for n in rewrite(textwrap.dedent(source).lstrip("\n"), **options).notes]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import fairscale", "import shardkit as fairscale"),
        ("import fairscale as fs", "import shardkit as fs"),
        ("import fairscale as fairscale", "import shardkit as fairscale"),
        (
            "import os, fairscale.nn , fairscale.optim as o, fairscale.optim",
            "import os, shardkit.nn, shardkit as fairscale , shardkit.optim as o, shardkit.optim",
        ),
        ("import fairscale.nn, fairscale", "import shardkit.nn, shardkit as fairscale"),
        ("from  fairscale.nn import (FSDP, # one\n  wrap)", "from  shardkit.nn import (FSDP, # one\n  wrap)"),
        ("from fairscale import nn as n;x=1", "from shardkit import nn as n;x=1"),
        ("from fairscale.optim.oss import *", "from shardkit.optim.oss import *"),
        ("from fairscale . nn import wrap", "from shardkit . nn import wrap"),
        ("import fairscale . nn;fairscale", "import shardkit . nn, shardkit as fairscale;fairscale"),
        # not the package
        ("from . import fairscale\nfairscale.nn", None),
        ("from .fairscale import nn", None),
        ("from other import fairscale\nfairscale.nn", None),
        ("import fairscaled, other.fairscale", None),
        ("# import fairscale\nx = 'import fairscale'", None),
        ("def f(fairscale): return fairscale.nn", None),
    ],
)
def test_import_statements(before: str, after: str | None) -> None:
    assert migrated(before) == (before if after is None else after)


@pytest.mark.parametrize(
    "other",
    [
        "shardkit = 3",
        "import other as shardkit",
        "from other import shardkit",
        "def f(shardkit): return fairscale.nn",
        "class shardkit: ...",
        "try: ...\nexcept E as shardkit: ...",
    ],
)
def test_our_name_may_be_taken(other: str) -> None:
    source = f"import fairscale\n{other}\nfairscale.nn"
    assert migrated(source) == source.replace("import fairscale", "import shardkit as fairscale")
    by_hand = f"import fairscale.nn\n{other}\nfairscale.nn"  # would bind that name
    assert migrated(by_hand) == by_hand
    assert [text.split(":")[0] for _, text in said(by_hand)] == ["left as it is"]


def test_a_file_that_was_migrated_in_part() -> None:
    before = "import shardkit\nimport fairscale.nn\nshardkit.nn"
    assert migrated(before) == "import shardkit\nimport shardkit.nn, shardkit as fairscale\nshardkit.nn"


def test_line_ends_tabs_and_form_feeds_stay() -> None:
    source = "if 1:\r\n\timport fairscale as f # a\r\n\x0c\nfrom fairscale \\\n  .nn import wrap\r\n"
    source += "y = '\u00fc\U0001f600'; import fairscale.nn as n\n \x0c \rfrom fairscale.nn import wrap"
    assert migrated(source) == source.replace("fairscale", "shardkit")


# ---------------------------------------------------------------- what is reported
def test_names_that_shardkit_lacks_or_redirects() -> None:
    notes = said(
        """
        from fairscale.nn import FullyShardedDataParallel, NoSuch
        import fairscale.no_such
        import fairscale.nn as fnn
        from fairscale import __version__, no_part
        from fairscale.version import __version_tuple__
        from fairscale.nope import *
        fnn.Missing.x, fnn.FullyShardedDataParallel.anything
        FullyShardedDataParallel._own, fnn.Missing.x
        from fairscale import *
        """
    )
    assert [line for line, _ in notes] == [1, 2, 4, 4, 6, 7, 9]  # once for each name
    texts = [text for _, text in notes]
    assert "shardkit.nn.NoSuch" in texts[0]
    assert "shardkit.no_such" in texts[1]
    assert any("drop this check" in text for text in texts[2:4])
    assert any("no_part" in text for text in texts[2:4])
    assert "shardkit.nope" in texts[4]
    assert "shardkit.nn.Missing" in texts[5]
    assert "drop this import" in texts[6]


def test_redirected_names_say_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    import shardkit.nn
    from shardkit.compat.redirected import redirected
    from shardkit.tools import migration

    monkeypatch.setattr(
        shardkit.nn, "Attic", redirected("nn.Attic", "torch.nn.New", why="torch has it"), raising=False
    )
    migration.objection.cache_clear()
    expected = "fairscale.nn.Attic is not carried over: torch has it. Use torch.nn.New instead."
    assert said("from fairscale.nn import Attic") == [(1, expected)]
    assert said("import fairscale\nfairscale.nn.Attic()") == [(2, expected)]
    migration.objection.cache_clear()


STRINGS = '''
"""About fairscale.nn.wrap."""
patch("fairscale.nn.wrap")
x = b"fairscale.nn", "not fairscale.nn", "fairscale.txt", r'fairscale.optim:OSS', "fairscale"
patch("train.fairscale.nn.wrap")
f"fairscale.nn.{x}"
'''


def test_strings_are_reported_or_rewritten_on_request() -> None:
    before = STRINGS.lstrip("\n")
    assert migrated(before) == before
    assert [line for line, _ in said(before)] == [2, 3, 3, 3, 5]
    after = migrated(before, strings=True)
    assert after == before.replace('("fairscale.nn.wrap', '("shardkit.nn.wrap').replace(
        "fairscale.opt", "shardkit.opt"
    )
    assert [line for line, _ in said(before, strings=True)] == [3, 3, 5]


def test_strings_in_pieces_are_one() -> None:
    before = "x = ('fairscale'\n  '.nn.wrap')\ny = 'see ' 'fairscale.nn'\nz = 'fairscale.nn' '.NoSuch'\n"
    assert migrated(before, strings=True) == before.replace("fairscale", "shardkit", 1)
    assert [line for line, _ in said(before)] == [1, 4]


CONFIGURATION = """\
_target_: fairscale.nn.FullyShardedDataParallel  # fairscale.nn
other: "fairscale.optim.oss:OSS"
unknown: fairscale.nn.NoSuch
path: /data/fairscale/x, my_fairscale.nn, fairscale-fork
require: fairscale>=0.4
"""


def test_configuration_files() -> None:
    result = rewrite_text(CONFIGURATION)
    assert result.source == CONFIGURATION
    assert [n.line for n in result.notes] == [1, 1, 2, 3, 5]
    result = rewrite_text(CONFIGURATION, strings=True)
    lines = CONFIGURATION.splitlines(keepends=True)
    assert result.source == "".join([line.replace("fairscale", "shardkit") for line in lines[:2]] + lines[2:])
    assert [n.line for n in result.notes] == [3, 5]
    assert "shardkit.nn.NoSuch" in result.notes[0].text


def test_torch_xla_on_request() -> None:
    source = """
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP, checkpoint_module
        from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy
        from torch_xla.distributed import fsdp
        import torch_xla.distributed.fsdp.wrap as w, torch_xla.core.xla_model as xm
        from torch_xla.distributed.fsdp_other import x
    """
    assert migrated(source) == textwrap.dedent(source)
    assert migrated(source, xla=True) == textwrap.dedent(
        source.replace("torch_xla.distributed.fsdp.", "shardkit.xla.fsdp.")
        .replace("torch_xla.distributed.fsdp ", "shardkit.xla.fsdp ")
        .replace("torch_xla.distributed import", "shardkit.xla import")
    )
    left = "import torch_xla.distributed.fsdp\nfrom torch_xla.distributed import fsdp, xla_backend\n"
    assert migrated(left, xla=True) == left
    assert [line for line, _ in said(left, xla=True)] == [1, 2]


def test_torchs_fsdp1_on_request() -> None:
    source = """
        import torch, torch.distributed.fsdp.wrap as w
        from torch.distributed.fsdp import (FullyShardedDataParallel as FSDP, # one
            StateDictType)
        from torch.distributed . fsdp.sharded_grad_scaler import ShardedGradScaler
        from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload, BackwardPrefetch
        from torch.distributed.fsdp_other import x
        from torch.distributed.checkpoint.state_dict import get_state_dict
    """
    assert migrated(source) == textwrap.dedent(source)
    assert migrated(source, torch_fsdp=True) == textwrap.dedent(
        source.replace("torch.distributed.fsdp.", "shardkit.torch_fsdp.")
        .replace("torch.distributed . fsdp.", "shardkit.torch_fsdp.")
        .replace("torch.distributed.fsdp ", "shardkit.torch_fsdp ")
        .replace("torch.distributed.checkpoint.state_dict", "shardkit.torch_fsdp.state_dict")
    )
    left = """
        import torch.distributed.fsdp
        from torch.distributed import fsdp
        from torch.distributed import fsdp, tensor
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp import MixedPrecision, FSDPModule
        from torch.distributed.fsdp._runtime_utils import _lazy_init
        x = torch.distributed.fsdp.MixedPrecision()
    """
    assert migrated(left, torch_fsdp=True) == textwrap.dedent(left)
    notes = said(left, torch_fsdp=True)
    assert [line for line, _ in notes] == [1, 2, 3, 4, 5, 6, 7]
    for (_, text), words in zip(
        notes,
        ("as something", "import torch_fsdp as fsdp", "make it two", "shardkit.fully_shard", "make it two imports",
         "no shardkit.torch_fsdp._runtime_utils", "to be imported"),
        strict=True,
    ):  # fmt: skip
        assert words in text


def test_what_is_no_python_is_an_error() -> None:
    with pytest.raises(SyntaxError, match="line 2 is no Python 3"):
        rewrite("\nprint 'fairscale'")
    with pytest.raises(SyntaxError, match="in other characters"):  # which Python reads as plain ones
        rewrite("import \U0001d4bbairscale.nn")


def test_files_may_nest() -> None:
    """As deep as Python itself follows: libraries that visit a tree by recursion give up long before."""
    for more in (
        "x = " + " + ".join(["f.nn"] * 800),
        "if a: pass\n" + "elif f.x: pass\n" * 800,
        "x = f" + ".a" * 800,
    ):
        assert migrated(f"import fairscale as f\n{more}") == f"import shardkit as f\n{more}"
