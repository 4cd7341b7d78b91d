"""Benchmarks exported models in ONNX Runtime and OpenVINO, next to files of these programs' own quantizers.

``lowbit bench engines`` writes engines.md: quality relative to fp32, size and time, at equal bits. Each model in each
program is a record in engines.jsonl next to it. ``--only REGEX`` measures some of them, and the page has all records.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lowbit.bench import engines_causal, engines_encoders
from lowbit.bench.engines_programs import Section, Table
from lowbit.files import read_records, write_record
from lowbit.machine import provenance
from lowbit.tables import markdown

__all__ = ["page", "run", "select"]

SECTIONS = (engines_encoders.SECTION, engines_causal.SECTION)


def select(only: str = "", text: Path | None = None) -> list[Table]:
    """The tables whose 'model, program' matches a regular expression. Raises ValueError if none does."""
    tables = [*engines_encoders.tables(), *engines_causal.tables(text)]
    try:
        chosen = [table for table in tables if re.search(only, table.name)]
    except re.error as error:
        raise ValueError(f"{only!r} is no regular expression: {error}") from None
    if not chosen:
        names = "; ".join(table.name for table in tables)
        raise ValueError(f"no table matches --only {only!r}; expected a part of one of: {names}")
    return chosen


def page(records: dict[str, dict[str, Any]]) -> str:
    """The page of all records. Facts about machines and runs that differ are listed one after the other."""
    keys = dict.fromkeys(key for record in records.values() for key in record["about"])
    values = {key: dict.fromkeys(record["about"].get(key) for record in records.values()) for key in keys}
    facts = [f"- {key}: {'; '.join(filter(None, runs))}" for key, runs in values.items()]
    parts = ["# Exported models in ONNX Runtime and OpenVINO\n", *facts]
    for section in SECTIONS:
        rows = [row for record in records.values() if record["section"] == section.title for row in record["rows"]]
        if rows:
            parts += [f"\n## {section.title}\n", f"{section.about}\n", _table(section, rows)]
    return "\n".join([*parts, ""])


def _table(section: Section, rows: list[list[str]]) -> str:
    return markdown(section.head, rows, numbers=range(section.texts, len(section.head)))


def run(directory: Path, only: str = "", text: Path | None = None) -> Path:
    """Measure the selected tables, and write ``engines.md`` after each."""
    tables = select(only, text)
    torch.set_num_threads(1)
    about = provenance("lowbit bench engines", packages=("onnxruntime", "openvino", "nncf", "transformers"))
    records, target = directory / "engines.jsonl", directory / "engines.md"
    for table in tables:
        with TemporaryDirectory() as scratch:
            rows = table.rows(Path(scratch))
        for row in rows:
            print(*row, sep=", ", flush=True)
        record = {"about": {**about, **table.facts}, "section": table.section.title, "rows": rows}
        write_record(records, table.name, record)
        target.write_text(page(read_records(records)))
    return target
