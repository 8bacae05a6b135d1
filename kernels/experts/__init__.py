"""A mixture of experts in a decode step: chosen, opened and summed on the device."""
