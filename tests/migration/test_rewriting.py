"""Imports of fairscale become shardkit's, and nothing else changes."""

from __future__ import annotations

import textwrap

import pytest

from shardkit.tools.migration.files import rewrite_text
from shardkit.tools.migration.rewriting import rewrite


def migrated(source: str, **options: bool) -> str:
    result = rewrite(textwrap.dedent(source), **options).source
    assert rewrite(result, **options).source == result
    return result


def said(source: str, **options: bool) -> list[tuple[int, str]]:
    return [(n.line, n.text) for n in rewrite(textwrap.dedent(source).lstrip("\n"), **options).notes]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import fairscale", "import shardkit"),
        ("import fairscale as fs", "import shardkit as fs"),
        ("import fairscale as fairscale", "import shardkit as fairscale"),
        ("import os, fairscale.nn , fairscale.optim as o", "import os, shardkit.nn , shardkit.optim as o"),
        ("from  fairscale.nn import (FSDP, # one\n  wrap)", "from  shardkit.nn import (FSDP, # one\n  wrap)"),
        ("from fairscale import nn as n;x=1", "from shardkit import nn as n;x=1"),
        ("from fairscale.optim.oss import *", "from shardkit.optim.oss import *"),
        ("from fairscale . nn import wrap", "from shardkit . nn import wrap"),
        ("import fairscale\nx = fairscale . nn", "import shardkit\nx = shardkit . nn"),
        ("global fairscale\nimport fairscale\nfairscale", "global shardkit\nimport shardkit\nshardkit"),
        ("import fairscale\n[(fairscale := x) for x in y]", "import shardkit\n[(shardkit := x) for x in y]"),
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


def test_the_variable_is_renamed_with_all_its_uses() -> None:
    before = """
        try:
            import fairscale, fairscale.nn.wrap  # fairscale
        except ImportError:
            fairscale = None

        def f(m: "fairscale.nn.Some", n: fairscale.nn.Module = fairscale.x) -> "list[fairscale.nn.X]":
            with open(fairscale.path) as file:
                return g(fairscale=fairscale.optim), self.fairscale, file.fairscale.nn

        def g():
            global fairscale
            import fairscale.optim
            del fairscale

        def h():
            import fairscale
            def inside():
                nonlocal fairscale
                return [fairscale.x for x in fairscale.y if (lambda: fairscale)]

        def own(fairscale):
            return fairscale.nn, [fairscale for fairscale in ()]

        match x:
            case fairscale.X(fairscale=3): ...
    """
    after = migrated(before)
    marked = before
    for kept in (
        "# fairscale", "g(fairscale=", "self.fairscale", "file.fairscale", "def own(fairscale)",
        "return fairscale.nn, [fairscale for fairscale in", "(fairscale=3)",
    ):  # fmt: skip
        assert marked.count(kept) == 1, kept
        marked = marked.replace(kept, kept.replace("fairscale", "KEPT"))
    assert after == textwrap.dedent(marked.replace("fairscale", "shardkit").replace("KEPT", "fairscale"))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    import fairscale\n    x = fairscale.nn",
        "import fairscale\n__all__ = ['fairscale']\nfairscale.nn",
        "import fairscale\n__all__ += ['fairscale']\nfairscale.nn",
        "import fairscale\n__all__: list = x + ['fairscale']\nfairscale.nn",
        "def f(fairscale=None):\n    import fairscale\n    return fairscale.nn",
        "import fairscale\nshardkit = 3\nfairscale.nn",
        "import fairscale\nimport other as shardkit\nfairscale.nn",
        "import fairscale\ndef f(shardkit): return fairscale.nn",
        "try:\n    import fairscale\nexcept ImportError:\n    import stub as fairscale\nfairscale.nn",
    ],
)
def test_a_variable_that_others_know_keeps_its_name(source: str) -> None:
    assert migrated(source) == source.replace("import fairscale", "import shardkit as fairscale", 1)
    # "import shardkit.nn as fairscale" would be something else.
    by_hand = source.replace("import fairscale", "import fairscale.nn", 1)
    assert migrated(by_hand) == by_hand
    assert "left as it is" in {text.split(":")[0] for _, text in said(by_hand)}


def test_a_file_that_was_migrated_in_part() -> None:
    assert (
        migrated("import shardkit\nimport fairscale\nfairscale.nn")
        == "import shardkit\nimport shardkit\nshardkit.nn"
    )


def test_line_ends_tabs_and_form_feeds_stay() -> None:
    source = "if 1:\r\n\timport fairscale # a\r\n\x0c\nx = fairscale.nn \\\n  .wrap\r\n"
    source += "y = '\u00fc\U0001f600'; fairscale.nn\n \x0c \nfairscale.nn"
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
    from shardkit.tools.migration import interfaces

    monkeypatch.setattr(
        shardkit.nn, "Attic", redirected("nn.Attic", "torch.nn.New", why="torch has it"), raising=False
    )
    interfaces.objection.cache_clear()
    expected = "fairscale.nn.Attic is not carried over: torch has it. Use torch.nn.New instead."
    assert said("from fairscale.nn import Attic") == [(1, expected)]
    assert said("import fairscale\nfairscale.nn.Attic()") == [(2, expected)]
    interfaces.objection.cache_clear()


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
    assert [line for line, _ in said(before)] == [2, 3, 3, 3, 4, 5]
    after = migrated(before, strings=True)
    assert after == before.replace('("fairscale.nn.wrap', '("shardkit.nn.wrap').replace(
        "fairscale.opt", "shardkit.opt"
    )
    assert [line for line, _ in said(before, strings=True)] == [3, 3, 4, 5]


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
        rewrite("import fairscale\n\U0001d4bbairscale.nn")


def test_files_may_nest() -> None:
    """As deep as Python itself follows: libraries that visit a tree by recursion give up long before."""
    for before in (
        "import fairscale\nx = " + " + ".join(["fairscale.nn"] * 800),
        "import fairscale\nif a: pass\n" + "elif fairscale.x: pass\n" * 800,
        "import fairscale\nx = fairscale" + ".a" * 800,
    ):
        assert migrated(before) == before.replace("fairscale", "shardkit")
