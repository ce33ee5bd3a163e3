"""fairscale.fair_dev.testing.golden_testing_data: gradients of two micro-batches and what AdaScale makes of them."""

from __future__ import annotations

import torch

from shardkit.types import StateDict

_Matrix = list[list[float]]


def _mean(rows: _Matrix) -> list[float]:
    """Returns the mean gradient, as fp32 has it."""
    return torch.tensor(rows).mean(0).tolist()  # type: ignore[no-any-return]


def _adascale(iterations: list[_Matrix], gain: float) -> StateDict:
    """One case: [iterations][2 micro-batches][2 features] and the gain after the last."""
    given = {"input": iterations[0]} if len(iterations) == 1 else {"inputs": iterations}
    grad = _mean(iterations[-1])
    return {**given, "expected_gain": gain, "expected_grad": [grad, grad], "expected_bias_grad": [1.0, 1.0]}


adascale_test_data: list[StateDict] = [
    _adascale([[[1.0, 0], [0, 1.0]]], 4.0 / 3),
    _adascale([[[1.0, 1.0], [1.0, 1.0]]], 1.0000001249999846),
    _adascale([[[-1.0, 1.0], [1.0, -1.0]]], 2.0),
    _adascale([[[1.0, 4.0], [5.0, 0.5]]], 1.4688796680497926),
    _adascale([[[-0.2, 3.0], [5.0, 0.5]]], 1.8472893901708),
    # smoothing takes part from the second iteration on
    _adascale([[[-0.2, 3.3], [5.2, 0.7]], [[1.0, 4.0], [3.1, 0.1]]], 1.6720968158031417),
]

_THREE: list[_Matrix] = [
    [[1.0, 0.0, 2.0], [2.0, 0.0, 1.0]],
    [[0.0, 1.0, 2.0], [2.0, 1.0, 0]],
    [[3.0, 1.0, 2.0], [2.0, 1.0, -1.0]],
]
corr_mean_test_data: list[StateDict] = [
    {
        "inputs": _THREE,
        "expected_grad": [_mean(rows) for rows in _THREE],
        "expected_corr": [0.5, -1.0, 0.327327],  # Pearson's, of the two micro-batches
        "expected_cos_similarity": [float("nan"), 0.8165, 0.8433],
    }
]
