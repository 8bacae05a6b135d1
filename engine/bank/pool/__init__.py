"""The pool of pinned host memory and the link to it."""
