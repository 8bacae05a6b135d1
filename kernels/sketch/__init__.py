"""What stands for K in few numbers (signs of directions, a low rank), and attention over the rows
that it chose.
"""
