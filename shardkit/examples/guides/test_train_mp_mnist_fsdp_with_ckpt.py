"""MNIST with torch_xla's interface of FSDP; its checkpoints are put together in the end, and tested.

python shardkit/examples/guides/test_train_mp_mnist_fsdp_with_ckpt.py --batch_size 16 --drop_last --use_nested_fsdp
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardkit.examples import mnist
from shardkit.examples.flags import parse
from shardkit.examples.guides import defaults


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    prefix = defaults.checkpoints("mnist-fsdp")
    own = {**defaults.of_mnist("xla_fsdp"), "ckpt_prefix": prefix}
    parser = mnist.parser("guides.test_train_mp_mnist_fsdp_with_ckpt", **own)
    return mnist.run(parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
