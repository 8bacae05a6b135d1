"""One driver: rank 0 reads, samples and prints, the others follow it, and none waits for a dead
one.
"""
