"""torch_tpu itself on the CPU: its operations compiled by XLA's own plugin for CPUs, in place of libtpu."""
