"""What AdaScale raises."""

from ..errors import ConfigurationError, LifecycleError


class AdaScaleArgumentError(ConfigurationError):
    """An argument of AdaScale can't work."""


class GradientOrderError(LifecycleError):
    """A call, or a gradient, came in the middle of something."""
