"""Helpers of a training beside wrappers: loss scaling, AdaScale, whole parameters, data, evaluation, out of memory."""
