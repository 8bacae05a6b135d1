"""The plan of a model over several devices."""
