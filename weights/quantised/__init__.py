"""Checkpoints that come quantised: one file per format, from stored tensors to one common form."""
