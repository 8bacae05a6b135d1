"""The scores of a window of queries by the C++ kernel (kernels/select/window_scores.py)."""
