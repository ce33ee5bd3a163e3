"""Folders of checkpoints: model, optimizer and everything else a training goes on from, at any world size."""
