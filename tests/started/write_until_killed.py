"""Writes a file in forks, each killed at another call that changes it."""

import os
import sys
import shardkit.checkpoint.files.writing as writing
from tests.started.killing import die_at

path, whole = sys.argv[1], b"new" * 1000
for k in range(100):
    with open(path, "wb") as file:
        file.write(b"old")
    child = os.fork()
    if not child:
        die_at(k, ("fsync", "replace", "unlink", "chmod"))
        with writing.write_atomically(path) as file:
            file.write(whole)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with open(path, "rb") as file:
        assert file.read() in (b"old", whole), k
    if status == 0:
        break
assert k > 6 and status == 0
with writing.write_atomically(path) as file:
    file.write(whole)
print(os.listdir(os.path.dirname(path)))
