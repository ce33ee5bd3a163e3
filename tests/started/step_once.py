"""Steps once with OSS and ShardedDDP, as many ranks as the argument says."""

import os
import sys
import torch
import shardkit


def rank_main(rank, text):
    model = torch.nn.Linear(3, 2)
    optimizer = shardkit.OSS(model.parameters(), lr=0.1)
    wrapped = shardkit.ShardedDDP(model, optimizer)
    wrapped(torch.ones(1, 3) * rank).sum().backward()
    optimizer.step()
    return f"{text}{rank}", os.environ["RANK"]


if __name__ == "__main__":
    try:
        print(shardkit.launch(rank_main, int(sys.argv[1]), args=("rank ",), start_timeout=20))
    except shardkit.ShardkitError as error:
        print(type(error).__name__, error)
