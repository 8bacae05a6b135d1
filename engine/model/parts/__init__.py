"""Parts of a model: layers that follow each other, each part on a device of its own."""
