"""torch_xla's interfaces for distributed training, served by shardkit.

Modules have the names they have in ``torch_xla.core`` and ``torch_xla.distributed``:

=================================================  ==========================================
``torch_xla.distributed.fsdp``                     :mod:`shardkit.xla.fsdp`
``torch_xla.distributed.zero_redundancy_optimizer``  :mod:`shardkit.xla.zero_redundancy_optimizer`
``torch_xla.distributed.xla_multiprocessing``      :mod:`shardkit.xla.xla_multiprocessing`
``torch_xla.distributed.xla_backend``              :mod:`shardkit.xla.xla_backend`
``torch_xla.distributed.parallel_loader``          :mod:`shardkit.xla.parallel_loader`
``torch_xla.core.xla_model``                       :mod:`shardkit.xla.xla_model`
=================================================  ==========================================

FSDP and the optimizer run on every backend of shardkit; what is about XLA devices needs torch_xla.
"""
