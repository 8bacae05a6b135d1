"""Exact mode measured: what is accepted on a real model, and what a cycle takes beside a full step.

python -m tools.studies.exact acceptance --model FOLDER
python -m tools.studies.exact speed --shape deep --contexts 8K,128K
python -m tools.studies.exact kernels --shape deep
"""
