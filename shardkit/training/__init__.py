"""What a training uses beside wrappers: loss scaling, AdaScale, whole parameters, data, evaluation, out of memory."""
