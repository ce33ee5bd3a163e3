"""Cross entropy of a large vocabulary without its logits: projection and loss tile by tile.

A language model's last layer makes T x V logits, often more memory than all the rest of it. Here only one tile of
them exists at a time: forward keeps the log-sum-exp of each token, backward makes the tiles once more.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n²) Memory" (2021), for the running log-sum-exp; Wang et al.,
"CosFace: Large Margin Cosine Loss for Deep Face Recognition" (2018), for margin and scale.

Legend of shapes: T tokens, V vocabulary, D width of the model, t and v those of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import ConfigurationError
from ..types import Context

_SMALLEST_NORM = 1e-12  # as in F.normalize


class Margin(NamedTuple):
    """Large margin cosine loss: logits are cosines, less ``margin`` at the target, times ``scale``."""

    margin: float
    scale: float


_Tiles = tuple[int, int]  # most tokens, and most words, of one


def linear_cross_entropy(
    input: torch.Tensor,  # [T, D]
    weight: torch.Tensor,  # [V, D]
    target: torch.Tensor,  # [T], int64
    *,
    tokens_per_tile: int = 1024,
    words_per_tile: int = 8192,
    reduction: str = "sum",
    margin: Margin | None = None,
) -> torch.Tensor:
    """``F.cross_entropy(input @ weight.T, target, reduction=...)`` in the memory of one tile of logits.

    Products are computed in the dtype of the arguments, the softmax in fp32 at least. Backward needs the weight as it
    was in forward, as that of a linear layer does.

    Args:
        tokens_per_tile, words_per_tile: most rows and columns of logits that exist at a time.
        reduction: "sum" or "mean".
        margin: for a large margin cosine loss; None: a plain one.

    Returns:
        The loss, [], in fp32 (fp64 for fp64 arguments).

    Raises:
        ConfigurationError: shapes that don't fit, or another reduction.
    """
    if reduction not in ("sum", "mean"):
        raise ConfigurationError(f'reduction is {reduction!r}; it is "sum" or "mean"')
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise ConfigurationError(
            f"input {tuple(input.shape)} and weight {tuple(weight.shape)} don't fit; "
            "they are [tokens, width] and [words, width]"
        )
    if target.shape != input.shape[:1]:
        raise ConfigurationError(
            f"target has shape {tuple(target.shape)}; {input.shape[0]} tokens have a target each"
        )
    tiles = max(tokens_per_tile, 1), max(words_per_tile, 1)
    device = input.device.type
    if torch.is_autocast_enabled(device):  # cast here, so that backward works on the same numbers
        input, weight = (t.to(torch.get_autocast_dtype(device)) for t in (input, weight))
    with torch.autocast(device, enabled=False):
        loss = _LinearCrossEntropy.apply(input, weight, target, tiles, margin)
    return loss / input.shape[0] if reduction == "mean" else loss


class _LossContext(Context):
    tiles: _Tiles
    margin: Margin | None


class _LinearCrossEntropy(torch.autograd.Function):
    """``apply(input, weight, target, tiles, margin)`` -> the sum over all tokens."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _LossContext,
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        tiles: _Tiles,
        margin: Margin | None,
    ) -> torch.Tensor:
        features = input if margin is None else F.normalize(input)
        # in fp32 at least; an index that is no word's is refused by the lookup, as in an embedding
        own_rows = F.embedding(target, weight)
        dtype = torch.promote_types(own_rows.dtype, torch.float32)
        own = (features * (own_rows if margin is None else F.normalize(own_rows))).to(dtype).sum(1)  # [T]
        if margin is not None:
            own = (own - margin.margin) * margin.scale
        log_sums = torch.full_like(own, -torch.inf)
        for first_word, words in _slices(weight, tiles[1]):
            rows = words if margin is None else F.normalize(words)
            for first, tokens in _slices(features, tiles[0]):
                part = slice(first, first + len(tokens))
                logits = _logits(tokens, rows, target[part] - first_word, margin)
                log_sums[part] = torch.logaddexp(log_sums[part], logits.logsumexp(1))
        ctx.save_for_backward(input, weight, target, log_sums)
        ctx.tiles, ctx.margin = tiles, margin
        return (log_sums - own).sum()

    @staticmethod
    def backward(ctx: _LossContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        input, weight, target, log_sums = ctx.saved_tensors
        margin: Margin | None = ctx.margin
        features = input if margin is None else F.normalize(input)
        # sums over tiles, so in the dtype of the softmax
        of_features = torch.zeros_like(features, dtype=log_sums.dtype) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for first_word, words in _slices(weight, ctx.tiles[1]):
            rows = words if margin is None else F.normalize(words)
            of_rows = torch.zeros_like(rows, dtype=log_sums.dtype)
            for first, tokens in _slices(features, ctx.tiles[0]):
                part = slice(first, first + len(tokens))
                places = target[part] - first_word
                slopes = _logits(tokens, rows, places, margin)  # [t, v], turned into d loss / d logits
                slopes.sub_(log_sums[part, None]).exp_()
                _add_at(slopes, places, -1.0)
                slopes.mul_(grad if margin is None else grad * margin.scale)
                slopes = slopes.to(rows.dtype)
                if of_features is not None:
                    of_features[part] += slopes @ rows
                if of_weight is not None:
                    of_rows += slopes.T @ tokens
            if of_weight is not None:
                own = of_rows if margin is None else _through_normalize(words, of_rows)
                of_weight[first_word : first_word + len(words)] = own
        if of_features is not None and margin is not None:
            of_features = _through_normalize(input, of_features)
        of_input = None if of_features is None else of_features.to(input.dtype)
        return of_input, of_weight, None, None, None


def _slices(tensor: torch.Tensor, rows: int) -> list[tuple[int, torch.Tensor]]:
    """Returns the tensor in pieces of so many rows, with the index of the first of each."""
    return [(i * rows, piece) for i, piece in enumerate(tensor.split(rows))]


def _logits(
    tokens: torch.Tensor,  # [t, D]; with a margin: of norm 1
    words: torch.Tensor,  # [v, D]; the same
    places: torch.Tensor,  # [t]: column of the target; outside of 0 ... v - 1 where it is in another tile
    margin: Margin | None,
) -> torch.Tensor:
    """[t, v], in fp32 at least; a tensor of its own."""
    product = tokens @ words.T
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    if margin is not None:
        _add_at(logits, places, -margin.margin)
        logits *= margin.scale
    return logits


def _add_at(matrix: torch.Tensor, places: torch.Tensor, value: float) -> None:
    """Adds a number to one column of each row, where that column exists; no data-dependent shapes."""
    inside = (places >= 0) & (places < matrix.shape[1])
    column = places.clamp(0, matrix.shape[1] - 1)[:, None]
    matrix.scatter_add_(1, column, (inside * value).to(matrix.dtype)[:, None])


def _through_normalize(rows: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of rows [n, D] from that of ``F.normalize(rows)``."""
    wide = rows.to(grad.dtype)
    norms = wide.norm(dim=1, keepdim=True).clamp(min=_SMALLEST_NORM)
    unit = wide / norms
    return (grad - unit * (grad * unit).sum(1, keepdim=True)) / norms
