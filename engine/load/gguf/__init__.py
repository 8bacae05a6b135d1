"""GGUF files as models: their fields, words and tensors in the engine's terms."""
