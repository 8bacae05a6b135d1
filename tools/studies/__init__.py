"""Experiments whose results are printed in docs: no part of the suite or of the wheel."""
