"""Products of many rows, such as a prompt's, by the C++ kernels: in tiles of AMX, and in strips."""
