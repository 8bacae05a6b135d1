"""The host tier: slots of a working set, gathering from pinned memory."""
