"""A bank's rows in every form."""
