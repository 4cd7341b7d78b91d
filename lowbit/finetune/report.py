"""The report of a fine-tuning run: settings, losses, memory and speed, with a plot of the losses."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowbit.dist_utils import processes
from lowbit.files import write_atomically
from lowbit.finetune.session import Session
from lowbit.machine import provenance
from lowbit.plan.fitting.choices import words
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["WATCHED", "numbers", "write"]

#: The files of a watched run: all rows, and their plot.
WATCHED = ("watch.json", "watch.png")


def numbers(session: Session) -> dict[str, Any]:
    """The results as JSON values."""
    history, plan = session.history, session.plan
    return {
        "config": asdict(session.config),
        "held_out": history.held_out,
        "train": history.train,
        "tokens_per_second": session.tokens_per_second,
        "process_peak_bytes": history.peak_bytes,
        "plan": None if plan is None else {
            "settings": words(session.run.settings), "budget": plan.budget, "predicted_bytes": plan.peak_bytes,
            "plain_bytes": plan.plain.peak_bytes,
        },
    }  # fmt: skip


def write(session: Session, directory: Path, command: str) -> Path:
    """Write ``report.md``, and ``losses.png`` if matplotlib is installed. Returns the report's path."""
    history, config, plan = session.history, session.config, session.plan
    plots = find_spec("matplotlib") is not None
    if plots:
        _plot(session, directory / "losses.png")
    watch = session.watch if session.watch is not None and session.watch.rows else None
    if watch is not None:
        watch.to_json(directory / WATCHED[0])
        if plots:
            watch.plot(directory / WATCHED[1])
    rows = [
        ("trained", f"adapters of rank {config.adapters}" if config.adapters else "all weights"),
        ("precision", _precision(session)),
        ("processes", "1" if (strategy := session.together.strategy) is None else f"{processes()}, {strategy}"),
        ("steps", f"{session.step} of {config.rows} x {config.length} tokens"),
        ("held-out loss before", f"{history.held_out[0][1]:.4f}"),
        ("held-out loss after", f"{history.held_out[-1][1]:.4f}"),
        ("tokens/s", f"{session.tokens_per_second:,.0f}"),
        ("largest memory of the first process", amount(history.peak_bytes)),
    ]
    if plan is not None:
        rows += [
            ("plan", words(session.run.settings)), ("budget", amount(plan.budget)),
            ("predicted peak of a step", amount(plan.peak_bytes)),
            ("predicted without a plan", amount(plan.plain.peak_bytes)),
        ]  # fmt: skip
    losses = [(str(steps), f"{loss:.4f}") for steps, loss in history.held_out]
    lines = [
        "# Fine-tuning\n", markdown(("", "value"), rows), "",
        *(["![losses](losses.png)\n"] if (directory / "losses.png").exists() else []),
        "## Held-out loss\n", markdown(("steps", "nats per token"), losses), "",
        *([] if watch is None else watch.section("Quantization error", WATCHED[0], WATCHED[1] if plots else None)),
        "## How it was made\n", *(f"- {key}: {value}" for key, value in provenance(command).items()),
    ]  # fmt: skip
    path = directory / "report.md"
    write_atomically(path, lambda file: file.write("\n".join(lines).encode() + b"\n"))
    return path


def _precision(session: Session) -> str:
    """The precision in words."""
    config, settings = session.config, session.run.settings
    name = settings.recipe or settings.precision or "fp32"
    tail = f", and {config.outside} from step {config.tail_begins} on" if config.tail_begins < config.steps else ""
    return f"{name}{tail}"


def _plot(session: Session, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, session.step + 1), session.history.train, label="training", linewidth=1)
    axes.plot(*zip(*session.history.held_out, strict=True), label="held out", marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
