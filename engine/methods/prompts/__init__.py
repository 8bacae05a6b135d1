"""Methods that choose what a prompt reads; their steps read everything."""
