"""How an answer is scored: the rules of LongBench, LongBench v2, L-Eval, InfiniteBench and
GraphWalks, each from 0 to 1.

chinese.py        words of a Chinese text
overlap.py        F1 of words, characters and sets
rouge.py          the longest common words of two texts
matches.py        a class, a paragraph, a count, a line of code, a letter, a number, a value
infinitebench.py  what the tasks of InfiniteBench's files ask for: numbers, options, names
exam.py           L-Eval's answers that are right or wrong
"""
