"""fairscale.experimental.nn.ssd_offload of fairscale 0.4.3 to 0.4.10, which dropped it itself."""

from shardkit.redirected import redirected

__all__ = ["SsdBuffer", "SsdFlatParameter", "SsdParameter", "SsdTensorHandle"]

SsdBuffer, SsdFlatParameter, SsdParameter, SsdTensorHandle = (
    redirected(
        f"experimental.nn.ssd_offload.{name}",
        "FullyShardedDataParallel(move_params_to_cpu=True)",
        why="fairscale dropped keeping parameters on disks in 0.4.11",
    )
    for name in ("SsdBuffer", "SsdFlatParameter", "SsdParameter", "SsdTensorHandle")
)
