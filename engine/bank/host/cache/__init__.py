"""What the device keeps of host memory from read to read, by blocks."""
