"""One conversation: the public face, its answers, checks and changes of method."""
