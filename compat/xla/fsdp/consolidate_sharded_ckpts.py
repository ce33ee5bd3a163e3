"""Command: puts the checkpoints of all ranks together into one of the full model.

::

    python -m shardkit.xla.fsdp.consolidate_sharded_ckpts --ckpt_prefix final_ckpt --ckpt_suffix "_rank-*-of-*.pth"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .state_dict_utils import consolidate_sharded_model_checkpoints


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line and consolidates."""
    parser = argparse.ArgumentParser(description="Consolidates sharded FSDP checkpoints of all ranks.")
    files = "checkpoints are the files that match prefix + suffix"
    parser.add_argument("--ckpt_prefix", required=True, help=f"how their paths begin; {files}")
    parser.add_argument("--ckpt_suffix", default="*.pth", help=f"how their paths end (a pattern); {files}")
    parser.add_argument(
        "--save_path", default="", help="where to save (default: prefix + '_consolidated.pth')"
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read files that hold more than data; that runs what they say",
    )
    options = parser.parse_args(arguments)
    consolidate_sharded_model_checkpoints(
        options.ckpt_prefix,
        options.ckpt_suffix,
        options.save_path,
        trust_pickle=options.trust_pickle,
        wait=0.0,
    )


if __name__ == "__main__":
    main()
