"""An index of K in place of K: what a step adds to it, and what queries choose by it."""
