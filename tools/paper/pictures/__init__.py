"""Draw a model's attention to a prompt as the OmniKV paper does: which layers and which steps
choose the same tokens, and how much of each layer's attention a choice below it keeps.

cli.py   the command line: python -m tools.paper.pictures
draw.py  the pictures, which need matplotlib; the JSON beside them does not
"""
