"""Compiles every Triton kernel without a GPU: `make kernels`, `python -m tools.compile_kernels`.

cases.py     the shipped configurations
calls.py     runs a configuration's launcher on meta tensors (shapes without memory)
variants.py  records what a launcher would launch: what is compiled is what is launched
compiler.py  compiles a variant for a GPU and reads registers, spills and shared memory off the code
store.py     keeps reports from run to run
cli.py       the command line and the table
predict.py   times of a model's steps from counted instructions and bytes
"""
