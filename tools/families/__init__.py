"""What each model family does here: `python -m tools.families` writes docs/MODELS.md.

models.py     a small random checkpoint of every family and variant, made by transformers
templates.py  chat templates in the families' forms
probes.py     what is tried on one checkpoint: it works, or the engine's own sentence says why not
facts.py      what is known without running: fields read, tensors expected, lines, aliases
page.py       the page
cli.py        the command line
speed.py      a decode step of every family beside Llama's: python -m tools.families.speed
"""
