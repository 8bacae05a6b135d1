"""The papers' tables and figures by name: one file a paper, each a list of declarations.

Figures are the papers' own, copied by hand; `source` of a table says from which table. What is not
at hand is left out, and the report says `not at hand`.
"""

from __future__ import annotations

from tools.paper.papers import adakv, infllm, omnikv, pod
from tools.paper.table import Table

TABLES: dict[str, Table] = {
    table.name: table for paper in (omnikv, adakv, pod, infllm) for table in paper.TABLES
}
