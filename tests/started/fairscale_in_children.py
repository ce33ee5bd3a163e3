"""Starts processes in which fairscale is shardkit, too."""

import sys
import shardkit

if __name__ == "__main__":
    assert "shardkit.nn" not in sys.modules
    assert shardkit.nn.FullyShardedDataParallel  # loaded when asked for
import fairscale  # noqa: F401, for children, which import this file too
from fairscale.nn import auto_wrap
import torch.multiprocessing


def child(rank, expected):
    import fairscale.optim

    assert fairscale.optim.OSS is shardkit.optim.OSS
    assert fairscale.__version__ == expected
    print("child", flush=True)
    return rank


if __name__ == "__main__":
    assert shardkit.nn.auto_wrap is auto_wrap
    print(sys.argv[1:], flush=True)
    torch.multiprocessing.spawn(child, args=("0.4.13",), nprocs=1)
    assert shardkit.launch(child, 1, args=("0.4.13",)) == [0]
    sys.exit(7)
