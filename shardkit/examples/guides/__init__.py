"""The training scripts of PyTorch/XLA's guides, under the names they have there, with the flags and defaults they have.

A command that a guide prints runs as it stands, with this folder in place of torch_xla's::

    python shardkit/examples/guides/test_train_mp_mnist_fsdp_with_ckpt.py --batch_size 16 --drop_last --num_epochs 2 \
        --use_nested_fsdp --use_gradient_checkpointing

Ranks are XLA's where torch_xla is installed, else gloo's; ``--backend`` chooses, ``--help`` lists the flags.
"""
