"""Accuracy, bytes and time of methods on one model."""
