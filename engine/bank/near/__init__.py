"""Layers some of whose K/V heads hold the K of the first and the newest tokens only."""
