"""Ends a process before or after one of the calls that change a folder."""

import os


def die_at(moment, names):
    """Two moments a call of ``os`` with one of these names: before it, and after it."""
    left = moment

    def counted(call):
        def wrapper(*arguments, **options):
            nonlocal left
            for after in range(2):
                if left == 0:
                    os.kill(os.getpid(), 9)
                left -= 1
                if not after:
                    result = call(*arguments, **options)
            return result

        return wrapper

    for name in names:
        setattr(os, name, counted(getattr(os, name)))
