"""Methods: the rows that each layer reads in a decode step. One file each; a method is a frozen
value, its runtime belongs to one session.
"""
