"""GGUF files of plain Llama models, read with distrust and written as Hugging Face folders."""
