"""Methods where a step reads as many bytes under each: the tables of a report, and its plot.

tables.py  KL, agreement, what was read and the distance to the oracle, budget by budget
plot.py    the same as one figure: a panel per budget, nearest first
"""
