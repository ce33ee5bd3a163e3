"""fairscale.experimental.wgit.signal_sparsity."""

import enum

from shardkit.redirected import redirected, redirected_function

__all__ = ["Algo", "SignalSparsity", "random_sparse_mask"]

_SPARSE = {
    "instead": "torch.ao.pruning or torchao.sparsity (masks), torch.topk of torch.fft (signals)",
    "why": "part of wgit's unfinished lossy compression",
}
SignalSparsity = redirected("experimental.wgit.signal_sparsity.SignalSparsity", **_SPARSE)
random_sparse_mask = redirected_function("experimental.wgit.signal_sparsity.random_sparse_mask", **_SPARSE)


class Algo(enum.Enum):
    """Transforms of a signal."""

    FFT = 0
    DCT = 1
