"""What AdaScale raises; AssertionErrors too, as in fairscale."""

from ..errors import ConfigurationError, LifecycleError


class AdaScaleArgumentError(ConfigurationError, AssertionError):
    """An argument of AdaScale can't work."""


class GradientOrderError(LifecycleError, AssertionError):
    """A call, or a gradient, came in the middle of something."""
