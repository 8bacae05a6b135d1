"""From a model's name to its files and tensors: hub aliases, safetensors, the shipped model.

Imports nothing from the engine.
"""
