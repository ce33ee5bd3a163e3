"""MNIST: gradients are reduced before the step, or by torch's DDP (``--ddp``).

python shardkit/examples/guides/test_train_mp_mnist.py --logdir mnist/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardkit.examples import mnist
from shardkit.examples.flags import parse
from shardkit.examples.guides import defaults


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = mnist.parser("guides.test_train_mp_mnist", **defaults.of_mnist("native"))
    return mnist.run(parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
