"""Prompts of every suite in a model's tokens, whoever makes or brings their text.

task.py      one task of a suite, and one document of it with its questions
instance.py  a made prompt in its parts, and its ids up to the question
fitting.py   as much context as fits a length
cutting.py   a text that is longer than the context, cut as its benchmark says
"""
