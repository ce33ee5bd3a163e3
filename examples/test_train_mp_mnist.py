"""MNIST as PyTorch/XLA's guide trains it: gradients are reduced before the step, or by torch's DDP (``--ddp``).

python examples/test_train_mp_mnist.py --logdir mnist/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import mnist
import training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = mnist.parser("test_train_mp_mnist", **mnist.guide("native"))
    return mnist.run(training.parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
