"""A layer beside attention: products, norms, rotation, the store."""
