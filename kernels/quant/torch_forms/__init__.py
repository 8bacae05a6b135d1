"""Quantised products by torch's operators, where no C++ kernel runs."""
