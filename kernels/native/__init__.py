"""C++ kernels for a CPU, compiled on the machine when they are first needed."""
