"""What a machine with GPUs shows: ``python -m tests.gpu`` runs it all and writes docs/GPU.md."""
