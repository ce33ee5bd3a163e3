"""Groups on top of torch.distributed: gloo, and what waits on a device's stream (NCCL)."""
