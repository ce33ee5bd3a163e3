"""Errors of pipelines that existing code catches as Python's own kinds."""

from __future__ import annotations

from ..errors import ConfigurationError


class PipeTypeError(ConfigurationError, TypeError):
    """Something is of a kind that a pipeline can't take."""


class BalanceError(ConfigurationError):
    """The numbers of layers in the partitions don't fit the module."""


class TooFewDevicesError(ConfigurationError, IndexError):
    """There are more partitions than devices or ranks to hold them."""
