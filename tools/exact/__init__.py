"""Exact mode measured: what is accepted on a real model, and what a cycle takes beside a full step.

python -m tools.exact acceptance --model FOLDER
python -m tools.exact speed --shape deep --contexts 8K,128K
python -m tools.exact kernels --shape deep
"""
