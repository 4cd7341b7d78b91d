"""Writes the C++ format table from lowbit/formats.py, which it loads by path: neither lowbit nor torch is imported.

Usage: generate_formats.py FORMATS_PY HEADER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HEAD = """\
// The table of number formats. Generated from lowbit/formats.py by csrc/generate_formats.py; change it there.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace lowbit {

struct FormatRow {
    const char* name;
    FormatParams params;
    const uint32_t* values;      // fp32 bits of every code's value, 2^bits of them
    const uint32_t* thresholds;  // codebooks: fp32 bits; code = how many of them lie below x
    const uint32_t* weights;     // codebooks: fp32 bits, one a value; 2^16 over the distance to the next one
    int32_t num_thresholds;
    int32_t zero_code;  // the code nearest to zero: what NaN becomes in a codebook
};
"""

TAIL = """
// The row with these parameters; null for a format that is none.
static inline const FormatRow* find_format(const FormatParams& format) {
    for (const FormatRow& row : kFormats) {
        if (row.params == format) return &row;
    }
    return nullptr;
}

}  // namespace lowbit"""


def load(path: Path) -> ModuleType:
    """The module at ``path``, without its package."""
    spec = importlib.util.spec_from_file_location("lowbit_formats", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def words(bits: tuple[int, ...]) -> str:
    lines = [", ".join(f"0x{b:08x}u" for b in bits[i : i + 8]) for i in range(0, len(bits), 8)]
    return ",\n    ".join(lines)


def array(name: str, bits: tuple[int, ...]) -> str:
    return f"static constexpr uint32_t {name}[] = {{\n    {words(bits)}}};"


def generate(formats: ModuleType) -> str:
    """The header's text: one row for every format that has codes, in the order of ``FORMATS``."""
    rows = [f for f in formats.FORMATS.values() if f.bits <= 8]
    out = [HEAD]
    out.append("// Which table this is: lowbit/backends/native.py compares.")
    out.append(f'constexpr char kFingerprint[] = "{formats.fingerprint()}";\n')
    for name, number in formats.KINDS.items():
        out.append(f"constexpr int32_t kKind{name.capitalize()} = {number};")
    for f in rows:
        out.append("\n" + array(f"kValues_{f.name}", f.bits_table))
        if f.kind == "codebook":
            out += [array(f"kThresholds_{f.name}", f.thresholds), array(f"kWeights_{f.name}", f.weights)]
    out.append("\nstatic constexpr FormatRow kFormats[] = {")
    for f in rows:
        params = ", ".join(map(str, f.params()))
        book = f"kThresholds_{f.name}, kWeights_{f.name}" if f.kind == "codebook" else "nullptr, nullptr"
        out.append(f'    {{"{f.name}", {{{params}}}, kValues_{f.name}, {book}, {len(f.thresholds)}, {f.zero_code}}},')
    out.append(f"}};\nconstexpr int kNumFormats = {len(rows)};\n")
    for index, f in enumerate(rows):
        out.append(f"constexpr int kIndex_{f.name} = {index};")
    out.append(TAIL)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    source, header = map(Path, sys.argv[1:])
    text = generate(load(source))
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists() or header.read_text() != text:
        header.write_text(text)
    else:
        header.touch()
