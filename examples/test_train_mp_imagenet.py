"""ImageNet as PyTorch/XLA's guide trains it: gradients are reduced before the step, or by torch's DDP (``--ddp``).

python examples/test_train_mp_imagenet.py --fake_data --model=resnet50 --num_epochs=1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import imagenet
import training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = imagenet.parser("test_train_mp_imagenet", **imagenet.guide("native"))
    return imagenet.run(training.parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
