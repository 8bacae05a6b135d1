"""Which layers should be filters: a search by what a set of full layers does to a model's answers.

passages.py  what a layer plan costs a text: KL against full attention, from one reading
score.py     the mean of that over several passages: what a search asks for
search.py    the best full layers of every number, one change at a time
reading.py   a calibration on a document while a session reads it
keep.py      omnikv.json beside the model, or in the user's cache

tools/calibrate has the texts, the table and the command line around the same search.
"""
