"""fairscale.experimental.wgit.signal_sparsity_profiling."""

from shardkit.redirected import redirected

__all__ = ["EnergyConcentrationProfile"]

EnergyConcentrationProfile = redirected(
    "experimental.wgit.signal_sparsity_profiling.EnergyConcentrationProfile",
    "torch.topk of torch.fft, and a cumulative sum",
    why="part of wgit's unfinished lossy compression",
)
