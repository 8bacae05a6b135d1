"""Methods over a model whose layers lie on several devices."""
