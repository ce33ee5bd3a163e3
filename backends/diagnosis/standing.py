"""What a rank does at this moment, in a sentence, for whoever asks from another thread."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import torch

from .calls import Call
from .thread_position import position_of

_SHARDKIT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = (
    _SHARDKIT,
    os.path.dirname(torch.__file__),
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    "<frozen",
)
_EXAMPLES = os.path.join(_SHARDKIT, "examples")
_WAITING = os.path.join("c10d", "waiting.py")


def standing(thread: int) -> str:
    """A sentence without its subject, as "waited in ..."; "" if the thread has ended.

    Args:
        thread: identifier of the one that trains.
    """
    position, frame = position_of(thread), sys._current_frames().get(thread)
    if position is None:
        return ""
    where, call = _line(frame) or position.where, _call(frame)
    if call is not None:
        return f"waited in {call.describe()}, at {where}"
    if position.operation:
        return f"waited in torch.distributed's {position.operation}, at {where}"
    if position.error:
        return f"handled {position.error}, at {where}"
    return f"{'ran backward' if position.in_backward else 'stood'} at {where}"


def _line(frame: FrameType | None) -> str:
    """The innermost line that is no library's; "" if there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_EXAMPLES) or not name.startswith(_LIBRARIES):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _call(frame: FrameType | None) -> Call | None:
    """The collective of ours that a frame or one of its callers waits in."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_WAITING):
            values = frame.f_locals
            found = values.get("call") or getattr(values.get("self"), "_call", None)
            if isinstance(found, tuple):
                return Call(*found)
        frame = frame.f_back
    return None
