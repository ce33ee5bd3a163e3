"""Saves more than a limit, and before that a disk, has room for; the old file stays."""

import errno
import os
import resource
import signal
import sys
from pathlib import Path
import torch
import shardkit


def fill(path: str, number: int) -> None:
    old = {"a": torch.ones(1000)}
    shardkit.save(old, path)
    before = Path(path).read_bytes()
    if number == errno.EFBIG:  # a limit in place of a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)
    for size in (1 << 20, 1 << 22):
        try:
            shardkit.save({"a": torch.ones(size), "b": torch.ones(3)}, path)
        except shardkit.FileNotWrittenError as error:
            assert isinstance(error, OSError) and error.errno == number, error.errno
            assert path in str(error) and "the file that was there is whole" in str(error), error
        else:
            raise AssertionError("no error")
        assert Path(path).read_bytes() == before
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    shardkit.save(old, path)


if sys.argv[2:]:
    fill(sys.argv[2], errno.ENOSPC)
fill(sys.argv[1], errno.EFBIG)
