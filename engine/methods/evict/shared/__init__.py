"""Shared by the methods that evict: settings, stores, runtimes."""
