"""Drawn programs that import fairscale: migrated, they bind the same objects."""

from __future__ import annotations

import ast
import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit import compat
from shardkit.backends.processes import RankPool
from shardkit.tools.migration import rewrite

NAMES = {
    "fairscale": ["nn", "optim", "internal"],
    "fairscale.nn": ["FullyShardedDataParallel", "wrap", "auto_wrap", "data_parallel", "NoSuch"],
    "fairscale.nn.wrap": ["auto_wrap", "enable_wrap"],
    "fairscale.nn.wrap.auto_wrap": ["ConfigAutoWrap", "wrap"],
    "fairscale.nn.auto_wrap": ["wrap"],
    "fairscale.nn.data_parallel": ["ShardedDataParallel", "sharded_ddp"],
    "fairscale.optim": ["OSS", "oss", "no_such"],
    "fairscale.optim.oss": ["OSS"],
    "fairscale.utils.testing": ["dist_init"],
    "fairscale.no_such": ["x"],
}
IMPORTABLE = sorted(n for n in NAMES if n != "fairscale.nn.auto_wrap")
space = st.sampled_from([" ", "  ", "\t", " \\\n "])
comment = st.sampled_from(
    ["", "", "  # fairscale.nn", " # import fairscale", ";pass", " ;x = 'fairscale.nn'"]
)
# Bound in every program; some of these shadow each other, which is as it should be.
alias = st.sampled_from(["a", "fs", "OSS", "nn", "été"])


@st.composite
def imports(draw: st.DrawFn) -> str:
    """One import statement."""
    if draw(st.booleans()):
        parts = draw(
            st.lists(
                st.tuples(st.sampled_from(["os", *IMPORTABLE]), st.none() | alias), min_size=1, max_size=3
            )
        )
        listed = [name + (f" as {other}" if other else "") for name, other in parts]
        return f"import{draw(space)}" + f"{draw(st.sampled_from(['', ' ']))},{draw(space)}".join(listed)
    module = draw(st.sampled_from(sorted(NAMES)))
    if module != "fairscale" and draw(st.integers(0, 7)) == 0:  # shardkit's root has names of its own
        return f"from {module} import *"
    parts = draw(
        st.lists(st.tuples(st.sampled_from(NAMES[module]), st.none() | alias), min_size=1, max_size=3)
    )
    listed = [name + (f" as {other}" if other else "") for name, other in parts]
    if draw(st.booleans()):
        inside = " , # fairscale\n\n   ".join(listed)
        return (
            f"from {module}{draw(space)}import{draw(space)}({draw(st.sampled_from(['', '#(']))}\n {inside}, )"
        )
    return f"from{draw(space)}{module} import " + ",".join(listed)


uses = st.sampled_from(
    [
        "seen.append(fairscale.nn.FullyShardedDataParallel)",
        "seen.append(fairscale . optim . OSS)",
        "seen += [fairscale.optim.OSS for _ in (1, 2)]",
        "seen.append((lambda fairscale: fairscale)(fairscale=4))",
        "seen.append(fairscale.no_such)",
        "holder.fairscale = 3; seen.append(holder.fairscale)",
        "seen.append({'fairscale': fairscale.nn.wrap}['fairscale'])",
        "fairscale = None",
        "del fairscale",
        "late = [lambda: fairscale.optim.OSS]; seen.append(late[0]())",
        "x: 'fairscale.nn.wrap' = 1",
        "print('fairscale', file=holder)",
    ]
)


def indented(text: str, by: str) -> str:
    return "".join(f"{by}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


@st.composite
def blocks(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    by = draw(st.sampled_from(["  ", "    ", "\t"]))
    body = indented(draw(inner), by)
    name = draw(st.sampled_from(["f", "g"]))
    return draw(
        st.sampled_from(
            [
                f"try:\n{body}except (ImportError, AttributeError, NameError):\n{by}fairscale = None\n",
                f"if True: # fairscale\n{body}else:\n{by}import fairscale\n",
                f"def {name}():\n{by}import fairscale\n{body}tried({name})\n",
                f"def {name}():\n{by}global fairscale\n{by}import fairscale.nn\n{body}tried({name})\n",
                f"def {name}(fairscale):\n{by}seen.append(fairscale)\n{by}pass\ntried({name}, 7)\n",
                f"while 1:\n{body}{by}break\n",
            ]
        )
    )


@st.composite
def programs(draw: st.DrawFn) -> str:
    line = st.builds(lambda s, c: f"{s}{c}\n", st.one_of(imports(), uses), comment)
    lines = st.lists(line, min_size=1, max_size=3).map("".join)
    block = st.recursive(
        lines, lambda inner: st.lists(blocks(inner), min_size=1, max_size=2).map("".join), max_leaves=3
    )
    return "import fairscale\n" + "".join(draw(st.lists(block, min_size=1, max_size=3)))


class Holder:
    """Takes attributes, and what is printed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def execute(source: str) -> tuple[dict[str, Any], list[Any], str | None]:
    """What a program binds, saw, and printed; and how it ended."""
    seen: list[Any] = []
    holder = Holder()

    def tried(fn: Any, *args: Any) -> None:
        try:
            fn(*args)
        except (ImportError, AttributeError, NameError) as error:
            seen.append(type(error))

    namespace: dict[str, Any] = {"seen": seen, "holder": holder, "tried": tried}
    ended = None
    try:
        exec(compile(source, "drawn", "exec"), namespace)
    except (ImportError, AttributeError, NameError) as error:
        ended = type(error).__name__
    # of Python's compiler: "import *" in a function, a name that is global and used before
    except SyntaxError:
        ended = "SyntaxError"
    given_by_us = {"seen", "holder", "tried", "late", "f", "g", "__builtins__", "__annotations__"}
    return {k: v for k, v in namespace.items() if k not in given_by_us}, [*seen, holder.text], ended


def both(rank: int, before: str, after: str) -> list[str]:
    """Runs a program with fairscale's names as shardkit's, and migrated; how they differ."""
    with compat.installed():
        bound, seen, ended = execute(before)
        import fairscale as root
    ours = sys.modules["shardkit"]

    def renamed(value: Any) -> Any:
        return ours if value is root else value

    expected = {k: renamed(v) for k, v in bound.items()}
    got, also_seen, also_ended = execute(after)
    got.pop("shardkit", None)
    differences = [f"{k}: {expected.get(k)} {got.get(k)}" for k in expected.keys() ^ got.keys()]
    differences += [
        f"{k}: {expected[k]} {got[k]}" for k in expected.keys() & got.keys() if expected[k] != got[k]
    ]
    if [renamed(v) for v in seen] != also_seen or ended != also_ended:
        differences.append(f"{ended} {seen}, {also_ended} {also_seen}")
    return differences + [m for m in sys.modules if m.startswith("fairscale")]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs(), line_end=st.sampled_from(["\n", "\r\n"]))
def test_drawn_programs(fresh: RankPool, program: str, line_end: str) -> None:
    source = program.replace("\n", line_end)
    ast.parse(source)
    after = rewrite(source).source
    ast.parse(after)
    assert rewrite(after).source == after
    # Byte for byte: only the name differs, and only in imports.
    again = after.replace(", shardkit as fairscale", "").replace("shardkit as fairscale", "shardkit")
    assert again.replace("shardkit", "fairscale") == source
    for kept in (
        "# fairscale",
        "# import fairscale",
        "'fairscale.nn'",
        "fairscale.optim.OSS for",
        "holder.fairscale",
    ):
        assert after.count(kept) == source.count(kept)
    assert fresh.run(both, source, after) == [[]]
