"""ImageNet with torch_xla's interface of FSDP.

python shardkit/examples/guides/test_train_mp_imagenet_fsdp.py --datadir FOLDER --drop_last --use_nested_fsdp
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardkit.examples import imagenet
from shardkit.examples.flags import parse
from shardkit.examples.guides import defaults


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = imagenet.parser("guides.test_train_mp_imagenet_fsdp", **defaults.of_imagenet("xla_fsdp"))
    return imagenet.run(parse(parser, argv))


if __name__ == "__main__":
    sys.exit(main())
