"""fairscale.nn.pipe.skip.portal. Skip tensors hidden from autograd."""

from shardkit.nn.pipe.copy import Context as CopyContext
from shardkit.nn.pipe.copy import Copy
from shardkit.nn.pipe.phony import get_phony
from shardkit.nn.pipe.skip.namespace import Namespace
from shardkit.nn.pipe.stream import get_device
from shardkit.redirected import redirected

__all__ = [
    "Context",
    "Copy",
    "CopyContext",
    "Namespace",
    "Portal",
    "PortalBlue",
    "PortalCopy",
    "PortalOrange",
    "get_device",
    "get_phony",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.skip.skippable",
    "why": "skip tensors are arguments and results that autograd sees",
}

Context = redirected("nn.pipe.skip.portal.Context", **_MOVED)
Portal = redirected("nn.pipe.skip.portal.Portal", **_MOVED)
PortalBlue = redirected("nn.pipe.skip.portal.PortalBlue", **_MOVED)
PortalCopy = redirected("nn.pipe.skip.portal.PortalCopy", **_MOVED)
PortalOrange = redirected("nn.pipe.skip.portal.PortalOrange", **_MOVED)
