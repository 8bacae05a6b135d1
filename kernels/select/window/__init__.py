"""What scores rows by a window of queries: Triton's first pass, and the C++ kernel."""
