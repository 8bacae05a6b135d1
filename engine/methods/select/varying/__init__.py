"""Methods whose query says how many tokens it wants, up to a budget."""
