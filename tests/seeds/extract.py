"""Cuts the code out of the documents: ``python -m tests.seeds.extract FOLDER`` writes tests/seeds/snippets/.

The rule: a snippet begins with the given line and ends with the next line that equals the last one, both included;
where a beginning is found several times in a document, ``nth`` says which. Nothing is changed in between. Leading
spaces of the two lines don't count. Command lines need no list: they are found.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

SNIPPETS = Path(__file__).parent / "snippets"


class Cut(NamedTuple):
    """Where a snippet is: the beginning of the document's file name, first and last line, which of the beginnings."""

    document: str
    first: str
    last: str
    nth: int = 0


CUTS = {
    "fairscale_ddp": Cut("001", "import torch", "optimizer.step()"),
    "fairscale_oss": Cut("001", "import torch", "optimizer.step()", 1),
    "fairscale_spawn": Cut("001", "mp.spawn(", ")"),
    "fairscale_scaler": Cut(
        "001", "from fairscale.optim.grad_scaler import ShardedGradScaler", "scaler.update()"
    ),
    "fairscale_fsdp": Cut("001", "import torch", "optimizer.step()", 2),
    "fairscale_wrap": Cut(
        "001",
        "import torch",
        "assert not isinstance(l.self_attn, FSDP) # self attention is not auto-wrapped",
        3,
    ),
    "xla_imports": Cut(
        "002", "import torch_xla.core.xla_model as xm", "import torch_xla.distributed.xla_backend"
    ),
    "xla_init": Cut(
        "002",
        'dist.init_process_group("xla", rank=rank, world_size=world_size)',
        'dist.init_process_group("xla", rank=rank, world_size=world_size)',
    ),
    "xla_ranks": Cut("002", "new_rank = xm.get_ordinal()", "world_size = xm.xrt_world_size()"),
    "xla_ddp": Cut("002", "import os", "run_demo(demo_basic)"),
    "xla_ddp_text": Cut("000", "import os", "run_demo(demo_basic)"),
    "xla_fsdp": Cut("000", "import torch", "optim.step()", 1),
    "xla_auto_wrap": Cut(
        "000",
        "from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy",
        "auto_wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Conv2d})",
    ),
    "xla_auto_wrapper": Cut(
        "000",
        "from torch_xla.distributed.fsdp import checkpoint_module",
        "checkpoint_module(m), *args, **kwargs)",
    ),
    "xla_checkpoint": Cut(
        "000",
        "ckpt = {",
        "} ckpt_path = f’/tmp/rank-{xm.get_ordinal()}-of-{xm.xrt_world_size()}.pth’ "  # noqa: RUF001
        "xm.save(ckpt, ckpt_path, master_only=False)",
    ),
    "xla_consolidate": Cut(
        "000",
        "python3 -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts \\",
        '--ckpt_suffix "_rank-*-of-*.pth"',
    ),
    "tutorial_setup": Cut(
        "003",
        "import torch.distributed as distdef setup(rank, world_size):    os.environ['MASTER_ADDR'] = 'localhost'",
        'dist.init_process_group("nccl", rank=rank, world_size=world_size)',
    ),
    "tutorial_prepare": Cut(
        "003",
        "from torch.utils.data.distributed import DistributedSamplerdef prepare(rank, world_size, batch_size=32, "
        "pin_memory=False, num_workers=0):",
        "return dataloader",
    ),
    "tutorial_prefix": Cut(
        "003",
        "# in case we load a DDP model checkpoint to a non-DDP modelmodel_dict = OrderedDict()",
        "model.load_state_dict(model_dict)",
    ),
    "tutorial_main": Cut("003", "def main(rank, world_size):", "cleanup()"),
    "tutorial_spawn": Cut("003", "import torch.multiprocessing as mp", ")"),
    "tutorial_cleanup": Cut("003", "def cleanup():", "dist.destroy_process_group()"),
    "tutorial_gather": Cut("003", "def main(rank, world_size):", "print(outputs)", 1),
}


def cut(text: str, where: Cut) -> str:
    """One snippet of a document."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == where.first]
    start = starts[where.nth]
    end = next(i for i in range(start, len(lines)) if lines[i].strip() == where.last)
    return "\n".join(lines[start : end + 1]) + "\n"


def commands(text: str) -> list[str]:
    """Every command line of a document that starts Python, as one line.

    It is between backticks, or goes to the end of its line, or of the last of several that end in a backslash; or to
    where the sentence goes on: "... on a TPU VM".
    """
    quoted = re.findall(r"`(python3?\s[^`]+)`", text)
    plain = re.sub(r"`[^`]*`", "", text).replace("\\\n", " ")
    found = quoted + re.findall(r"\b(python3? +(?:-m +[\w.]+|\S+\.py)\b.*)", plain)
    return [" ".join(command.split(" on a TPU")[0].split()) for command in found]


def extract(folder: Path) -> dict[str, str]:
    """All snippets of the documents in a folder, by name; ``commands`` has all command lines, each once."""
    texts = {path.name[:3]: path.read_text() for path in sorted(folder.glob("*.txt"))}
    found = {name: cut(texts[where.document], where) for name, where in CUTS.items()}
    lines = dict.fromkeys(line for text in texts.values() for line in commands(text))
    return {**found, "commands": "\n".join(sorted(lines)) + "\n"}


if __name__ == "__main__":
    for name, text in extract(Path(sys.argv[1])).items():
        (SNIPPETS / f"{name}.txt").write_text(text)
