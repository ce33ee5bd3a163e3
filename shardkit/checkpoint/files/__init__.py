"""Torch's file formats: what is read is data alone and is checked, what is written is whole or not there."""
