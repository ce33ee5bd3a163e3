"""MNIST with torch_xla's interface of FSDP; its checkpoints are put together in the end, and tested.

python examples/test_train_mp_mnist_fsdp_with_ckpt.py --batch_size 16 --drop_last --use_nested_fsdp
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import images
import mnist
import training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = mnist.parser(
        "test_train_mp_mnist_fsdp_with_ckpt",
        **mnist.guide("xla_fsdp"),
        ckpt_prefix=str(images.default_folder("mnist-fsdp") / "final_ckpt"),
    )
    return mnist.run(training.parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
