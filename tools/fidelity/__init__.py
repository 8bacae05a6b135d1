"""How near a method stays to full attention on real text.

`python -m tools.fidelity --model FOLDER` decodes the end of real documents
(tools/common/documents.py) step by step under every method and compares each step with full
attention's: KL, top-1 agreement, bytes read. With controls that choose at random, one token, or the
newest ones. docs/FIDELITY.md says how to read the report.
"""
