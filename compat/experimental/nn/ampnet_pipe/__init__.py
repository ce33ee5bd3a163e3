"""fairscale.experimental.nn.ampnet_pipe. Asynchronous updates in a pipeline (AMPNet)."""
