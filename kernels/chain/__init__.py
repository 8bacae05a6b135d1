"""Layers of a decode step that run one behind another in one call of the C++ kernels."""
