"""Heads of a layer that keep by different rules: who is of which kind, what each kind holds."""
