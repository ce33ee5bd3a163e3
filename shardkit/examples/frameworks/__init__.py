"""One small model trained through five doors: each script gives the weights of one process.

::

    torchrun --nproc-per-node 2 -m shardkit.examples.frameworks.transformers_trainer --folder out --steps 4
    torchrun --nproc-per-node 2 -m shardkit.examples.frameworks.fabric_loop --resume out/checkpoint-4 --folder out
    python -m shardkit.examples.frameworks.torch_loop --resume out/fabric.ckpt --steps 12        # one process

``transformers_trainer``, ``accelerate_loop``, ``lightning_trainer``, ``fabric_loop``, and ``torch_loop``, which is
written for torch's ``fully_shard``, with one import changed.
"""
