"""The host tier of a bank: blocks that stream, working sets, write-back."""
