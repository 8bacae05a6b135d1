"""GGUF files, read with distrust: the header, the blocks of each type, tensors as they stream."""
