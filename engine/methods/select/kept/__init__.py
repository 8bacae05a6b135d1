"""Blocks of the past of which a session keeps a number, however long it is."""
