"""Steps over the parts of a model, each on its device."""
