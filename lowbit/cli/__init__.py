"""The command ``lowbit``. One file here is one command; all of them are listed in ``COMMANDS``."""

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
from lowbit.cli import bench, calibrate, doctor, evaluate, fit, formats, quantize, train
from lowbit.cli.console import MISTAKES, errors, out, print_error

__all__ = ["app", "main"]

COMMANDS: tuple[Callable[..., None], ...] = (
    formats.formats,
    train.train,
    fit.fit,
    calibrate.calibrate,
    quantize.quantize,
    evaluate.evaluate,
    bench.bench,
    doctor.doctor,
)


class _Commands(TyperGroup):
    """The commands. An interrupt from the keyboard prints what to do next."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            errors.print("; ".join(["stopped", *map(str, stop.args)]), highlight=False, soft_wrap=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="lowbit",
    cls=_Commands,
    epilog="Begin with: lowbit formats fp8_e4m3   ·   lowbit train   ·   lowbit doctor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        out.print(f"lowbit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """Low-bit numbers for PyTorch: formats, training in FP8, quantized models, measured kernels."""


def _told(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning without the line of the command's own code that it was raised at."""
    errors.print(Text.assemble(("warning:", "bold yellow"), f" {message}"), highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line. A warning is one message, and a user's mistake is another and exit code 1 (set
    LOWBIT_TRACEBACK=1 for their origin).
    """
    if os.environ.get("LOWBIT_TRACEBACK"):
        app()
        return
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _told
            app()
    except MISTAKES as error:
        print_error(error)
        sys.exit(1)
