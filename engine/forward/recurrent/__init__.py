"""Recurrent layers in a pass of tokens."""
