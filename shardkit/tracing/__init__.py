"""Named ranges, traces of several ranks and what they tell, and metrics of a training.

``ranges`` is what everything that communicates uses; ``tracer`` writes traces, ``timeline`` reads them, ``metrics``
writes numbers while a training runs.
"""
