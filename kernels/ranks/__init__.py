"""What processes of one machine that hold one model leave for each other in shared memory."""
