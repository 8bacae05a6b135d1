"""What a sample that the model reads teaches a choice, and methods that differ in nothing else."""
