"""A choice of a prompt's rows at its end, and in each step a choice among those."""
