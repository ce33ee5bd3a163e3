"""Compares runs: losses against one process, bytes a rank against DDP."""

from __future__ import annotations

from dataclasses import dataclass

from .train import Outcome

HEADINGS = (
    "strategy",
    "steps",
    "parameters",
    "gradients",
    "optimizer state",
    "total",
    "of DDP",
    "loss off by",
)


@dataclass(frozen=True)
class Row:
    """One strategy. Bytes are those of the rank that holds the most.

    Attributes:
        loss_difference: largest relative difference, over all steps, between the mean of the ranks' losses
            and the loss of one process on the same images.
    """

    strategy: str
    steps: int
    parameters: int
    gradients: int
    state: int
    loss_difference: float

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer state together."""
        return self.parameters + self.gradients + self.state


def compare(strategy: str, ranks: list[Outcome], reference: list[float]) -> Row:
    """The row of a strategy from what each rank saw and the losses of one process."""
    mean_losses = [sum(step) / len(step) for step in zip(*(r.losses for r in ranks), strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in zip(mean_losses, reference, strict=False)]
    fullest = max(ranks, key=lambda r: r.parameters + r.gradients + r.state)
    return Row(
        strategy,
        len(mean_losses),
        fullest.parameters,
        fullest.gradients,
        fullest.state,
        max(differences, default=float("nan")),
    )


def show(rows: list[Row]) -> None:
    """Prints the rows as a table."""
    ddp = next(row.total for row in rows if row.strategy == "ddp")
    cells: list[tuple[str, ...]] = [
        (
            row.strategy,
            f"{row.steps:,}",
            f"{row.parameters:,}",
            f"{row.gradients:,}",
            f"{row.state:,}",
            f"{row.total:,}",
            f"{row.total / ddp:.0%}",
            f"{row.loss_difference:.0e}" if row.strategy != "single" else "-",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [HEADINGS, *cells]) for i in range(len(HEADINGS))]
    print(
        "Bytes on the fullest rank after a backward (state: the optimizer's), and how far the losses are from"
    )
    print("those of one process (largest relative difference of all steps):")
    for line in [HEADINGS, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
