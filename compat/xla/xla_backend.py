"""torch_xla.distributed.xla_backend: importing it makes ``init_process_group("xla")`` known to torch.distributed."""

from torch_xla.distributed.xla_backend import ProcessGroupXla

__all__ = ["ProcessGroupXla"]
