"""Ranks of one model beside threads of one process: python -m tools.speed.ranks."""
