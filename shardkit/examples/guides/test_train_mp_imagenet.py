"""ImageNet: gradients are reduced before the step, or by torch's DDP (``--ddp``).

python shardkit/examples/guides/test_train_mp_imagenet.py --fake_data --model=resnet50 --num_epochs=1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardkit.examples import imagenet
from shardkit.examples.flags import parse
from shardkit.examples.guides import defaults


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = imagenet.parser("guides.test_train_mp_imagenet", **defaults.of_imagenet("native"))
    return imagenet.run(parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
