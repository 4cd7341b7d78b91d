"""``lowbit formats``: the table of number formats, all codes of one format, or the storage of a scheme."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lowbit.cli.console import out, print_json
from lowbit.formats import FORMATS, Format, find, power_of_two
from lowbit.scaling import SHORT_NAMES, Scheme, scheme
from lowbit.tables import aligned, rich_table

EPILOG = """
**Examples**

`lowbit formats` — every format with its range and precision

`lowbit formats fp8_e4m3` — all 256 codes: `0|0110|100` is 0.75

`lowbit formats e2m1b3` — a custom format: 2 exponent bits, 1 mantissa bit, bias 3

`lowbit formats int4 --scale 2^-3` — int4 with a power-of-two scale

`lowbit formats int4:group128` — a scheme: block, scale format and bits per element
"""


def formats(
    name: Annotated[str, typer.Argument(help="A format (fp8_e4m3, e2m1b3) or a scheme (int4:group128, mxfp4).")] = "",
    scale: Annotated[str, typer.Option(help="Multiply values by this scale: a number, or a power such as 2^-3.")] = "1",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show all number formats, or every code of one format with its bits and value, or a quantization scheme."""
    if not name:
        rows = [properties(row) for row in FORMATS.values()]
        print_json(rows) if json else out.print(_table(rows))
    elif name in FORMATS or (":" not in name and name not in SHORT_NAMES):
        _print_format(find(name), _number(scale), json)
    else:
        fields = _describe(scheme(name))
        print_json(fields) if json else out.print(_pairs(fields))


formats.__doc__ = f"{formats.__doc__}\n{EPILOG}"


def properties(row: Format) -> dict[str, Any]:
    """The properties of a format, as printed."""
    return {
        "name": row.name,
        "bits": row.bits,
        "layout": row.layout,
        "bias": row.bias if row.kind in ("float", "exponent") else None,
        "max": row.max,
        "min": -row.max if row.kind == "float" else row.codebook[0] if row.codebook else float(min(row.qmin, 0)),
        "min_normal": row.min_normal,
        "min_subnormal": row.min_subnormal,
        "epsilon": row.epsilon,
        "finite": row.num_finite,
        "inf": row.has_inf,
        "nan": {"none": "none", "ieee": "many", "all_ones": "all ones"}[row.nan],
        "torch_dtype": row.torch_dtype,
        "source": row.source,
    }


def split_bits(row: Format, code: int) -> str:
    """The bits of a code, split into sign, exponent and mantissa: ``0|0110|100``."""
    bits = f"{code:0{row.bits}b}"
    if row.kind != "float":
        return bits
    return "|".join(field for field in (bits[:1], bits[1 : 1 + row.exponent], bits[1 + row.exponent :]) if field)


def number(value: float) -> str:
    """An exact value as text; a small or large power of two as ``2^-9``."""
    exponent = power_of_two(value)
    if exponent is not None and not -6 <= exponent <= 20:
        return f"{'-' if value < 0 else ''}2^{exponent}"
    return "NaN" if math.isnan(value) else repr(value).removesuffix(".0").replace("inf", "Inf")


def codes(row: Format, scale: float) -> list[dict[str, Any]]:
    """Every code of a format of at most 8 bits."""
    return [
        {"code": code, "bits": split_bits(row, code), "value": value * scale} for code, value in enumerate(row.table)
    ]


def _number(text: str) -> float:
    base, _, power = text.partition("^")
    try:
        value = float(base) ** float(power) if power else float(text)
    except (ValueError, ArithmeticError):  # not a number, out of range, or a negative power of zero
        value = math.nan
    if isinstance(value, complex) or not math.isfinite(value):
        raise ValueError(f"--scale expects a finite real number or power, such as 0.25 or 2^-3, got {text!r}")
    return value


def _print_format(row: Format, scale: float, json: bool) -> None:
    lines = codes(row, scale) if row.bits <= 8 else []
    if json:
        print_json({**properties(row), "scale": scale, "codes": lines})
        return
    out.print(_pairs(properties(row)))
    if not lines:
        out.print(f"\n{row.name} has 2^{row.bits} codes, too many to list.")
        return
    times = "" if scale == 1 else f" x {number(scale)}"
    out.print(f"\ncode  {'bits':<{row.bits + 2}}  value{times}", style="bold")
    for line in lines:
        exact = number(line["value"])
        text = Text(f"0x{line['code']:02x}  {line['bits']:<{row.bits + 2}}  {exact}")
        if "^" in exact:
            text.append(f"  {line['value']!r}", "dim")
        out.print(text, soft_wrap=True)


def _describe(scheme: Scheme) -> dict[str, Any]:
    rows, cols = scheme.block
    block = f"{'all' if rows is None else rows} x {'all' if cols is None else cols}"
    example = (1024, 1024)
    return {
        "scheme": scheme.name,
        "format": scheme.format.name,
        "block (rows x cols)": block,
        "scale format": scheme.scale_format.name,
        "scale rounding": scheme.rounding,
        "signed full range": scheme.full,
        "zero point": scheme.affine and not scheme.minimum,
        "minimum": scheme.minimum,
        "global fp32 scale": f"one per {scheme.global_scale}" if scheme.global_scale else False,
        "bits per element (1024 x 1024)": round(8 * scheme.nbytes(example) / (example[0] * example[1]), 4),
    }


def _pairs(values: dict[str, Any]) -> Table:
    return rich_table((), ((Text(key.replace("_", " "), "bold"), _cell(value)) for key, value in values.items()))


def _table(rows: list[dict[str, Any]]) -> Text:
    """The table in plain text, because it must fit 80 columns."""
    keys = ("name", "bits", "layout", "bias", "max", "min_normal", "min_subnormal", "epsilon", "finite")
    cells = [["name", "bits", "layout", "bias", "max", "normal", "least", "epsilon", "finite", "special"]]
    for row in rows:
        special = " ".join(word for word, present in (("Inf", row["inf"]), ("NaN", row["nan"] != "none")) if present)
        cells.append([*(_cell(row[key]) for key in keys), special or "-"])
    head, _, body = aligned(cells, numbers=(1, 3, 4, 5, 6, 7, 8), gap=1).partition("\n")
    note = "normal: smallest normal value; least: smallest positive value"
    return Text.assemble((head, "bold"), "\n", body, "\n\n", (note, "dim"))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = number(value)
        return text if len(text) <= 8 else f"{value:.3g}"
    return f"{value:.2g}" if isinstance(value, int) and value > 999999 else str(value)
