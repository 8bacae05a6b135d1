"""Bounds of choosing: a step reads what each layer's true attention says, or what chance does."""
