"""The command line ``lowbit``: one file per command, listed in ``COMMANDS``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from lowbit._version import __version__
from lowbit.cli import bench, calibrate, doctor, evaluate, export, fit, formats, generate, quantize, train
from lowbit.cli.console import MISTAKES, errors, out, print_error

__all__ = ["app", "main"]

COMMANDS: tuple[Callable[..., None], ...] = (
    formats.formats,
    train.train,
    fit.fit,
    calibrate.calibrate,
    quantize.quantize,
    evaluate.evaluate,
    export.export,
    generate.generate,
    bench.bench,
    doctor.doctor,
)


class _Commands(TyperGroup):
    """The commands. Ctrl-C prints how to continue."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            errors.print("; ".join(["stopped", *map(str, stop.args)]), highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="lowbit",
    cls=_Commands,
    epilog="Start with: lowbit doctor   ·   lowbit fit demo --memory 60%   ·   lowbit formats fp8_e4m3",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


def _version(show: bool) -> None:
    if show:
        out.print(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """Train and run PyTorch models within a memory budget: FP8 and FP4 training, low-bit optimizers, quantization."""


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning without the source line that raised it."""
    errors.print(Text.assemble(("warning:", "bold yellow"), f" {message}"), highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line.

    A warning or a user error prints one line; a user error exits with code 1. LOWBIT_TRACEBACK=1 prints tracebacks.
    """
    if os.environ.get("LOWBIT_TRACEBACK"):
        app()
        return
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            app()
    except MISTAKES as error:
        print_error(error)
        sys.exit(1)
