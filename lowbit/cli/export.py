"""``lowbit export``: write a saved model for another program."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lowbit import interop
from lowbit.cli.console import errors, out, print_json, size
from lowbit.cli.models import MODEL, load, tokenizer_in

EPILOG = """
**Examples**

`lowbit export SmolLM2-q4_0 --to gguf --out SmolLM2.gguf` — for llama.cpp: `llama-cli -m SmolLM2.gguf`

`lowbit export SmolLM2-int4 --to compressed-tensors --out SmolLM2-vllm` — for vLLM and transformers

`lowbit export MiniLM-int8 --to onnx --out MiniLM.onnx` — for ONNX Runtime

`lowbit export model --to gguf --out model.gguf --tokenizer meta-llama` — the tokenizer from another directory

Formats: {formats}
"""


def export(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    to: Annotated[str, typer.Option("--to", help=f"The format: {' or '.join(interop.WRITTEN)}.")],
    target: Annotated[Path, typer.Option("--out", help="The file or directory to write.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory with the tokenizer; by default MODEL's own, if it has one."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a saved model for llama.cpp, vLLM, ONNX Runtime or OpenVINO, with unchanged codes and scales."""
    started = time.perf_counter()
    takes = interop.find_format(to).takes
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    with errors.status(Text(f"loading {source}")):
        model = load(source)
    words = tokenizer if tokenizer is not None or takes != "tokenizer" else tokenizer_in(source)
    if takes == "batch":
        model = model.float()
    with errors.status(Text(f"writing {target}")):
        report = interop.export(model, to, target, words)
    if json:
        print_json({**report.to_dict(), "out": str(target)})
        return
    out.print(str(report), soft_wrap=True)
    without = ""
    if words is None and takes == "tokenizer":
        without = "; it has no tokenizer, because MODEL has none: pass --tokenizer DIR"
    files = target.iterdir() if target.is_dir() else [target, *_constants(target)]
    total = sum(path.stat().st_size for path in files)
    out.print(f"{time.perf_counter() - started:.1f} s; {size(total)} in {target}{without}", soft_wrap=True)


def _constants(graph: Path) -> list[Path]:
    """The files with a graph's constants."""
    return [path for path in (graph.with_suffix(".bin"), graph.with_name(f"{graph.name}.data")) if path.exists()]


export.__doc__ = f"{export.__doc__}\n{EPILOG}".format(
    formats=", ".join(f"{row.name} ({row.about})" for row in interop.FORMATS.values() if row.write)
)
