"""What check_gpu measures, section by section."""
