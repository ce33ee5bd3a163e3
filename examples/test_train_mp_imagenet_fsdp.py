"""ImageNet with torch_xla's interface of FSDP.

python examples/test_train_mp_imagenet_fsdp.py --datadir FOLDER --drop_last --use_nested_fsdp
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import imagenet
import training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = imagenet.parser("test_train_mp_imagenet_fsdp", **imagenet.guide("xla_fsdp"))
    return imagenet.run(training.parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
