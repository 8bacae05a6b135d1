"""Who runs a kernel and with which launch shapes."""
