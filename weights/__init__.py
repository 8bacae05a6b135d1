"""Names to files to tensors: hub aliases, safetensors, the shipped model. Knows nothing of the
engine.
"""
