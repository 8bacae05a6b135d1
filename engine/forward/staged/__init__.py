"""Layers whose matrices lie in host memory and come to the device in turn, pass by pass."""
