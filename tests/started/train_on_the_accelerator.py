"""Trains on whatever accelerator torch finds, without naming a backend."""

import torch
import shardkit


def train(rank):
    torch.manual_seed(0)
    model = shardkit.FSDP(torch.nn.Linear(5, 3).to(torch.accelerator.current_accelerator()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 5), float(rank)).to("late")
    model(x).sum().backward()
    optimizer.step()
    print(next(model.parameters()).device, flush=True)
    return model.state_dict()["bias"].cpu().tolist()


if __name__ == "__main__":
    torch.manual_seed(0)
    bias = torch.nn.Linear(5, 3).bias - 0.2  # each of the 3 sums has 2 rows
    found = shardkit.launch(train, 2)
    assert all(torch.allclose(torch.tensor(b), bias) for b in found), (found, bias)
    print("the CPU's numbers")
