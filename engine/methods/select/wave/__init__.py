"""Clusters of K of which a step reads the best, estimates the next, and leaves the rest."""
