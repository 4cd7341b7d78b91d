"""The demo's report: Markdown with two plots, and the numbers as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lowbit.backends.cpu import processor
from lowbit.demo import explain, planned
from lowbit.demo.config import FLOATS
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import Measurement, RunSettings, as_json, run_path
from lowbit.demo.explain import Held
from lowbit.demo.loop import Trainer
from lowbit.files import write_atomically
from lowbit.machine import provenance
from lowbit.sizes import share_changed
from lowbit.tables import markdown
from lowbit.train.watcher import Watch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["claims", "without_plots", "write"]

#: Largest relative increase of the held-out loss that a run may have.
LOSS_TARGET = 0.01
#: Largest relative change of a recipe's peak step memory from the first run, without and with checkpointing.
PEAK_TARGETS = {False: -0.25, True: -0.05}
#: Largest relative increase of the perplexity by recipe.
PERPLEXITY_TARGETS = {"int8": 0.005, "int4-weight-only:group32": 0.05}

#: The files that ``write`` writes.
FILES = ("report.md", "report.json", "loss.png", "recipes.png")

_INK, _PALE, _GOOD = "#1f2933", "#9aa5b1", "#2b8a3e"
_LINES = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#5f3dc4")
_BARS = ("#2f6fde", "#e08e0b", "#1c9a86")


def write(
    directory: Path,
    settings: RunSettings,
    corpus: Corpus,
    runs: list[Trainer],
    rows: list[Measurement],
    memory: list[Held],
    command: str,
) -> Path:
    """Write ``report.md``, ``report.json`` and, if matplotlib is installed, ``loss.png`` and ``recipes.png``.

    Watched runs get ``watch.json`` and ``watch.png``, and profiled runs ``memory.json`` and ``memory.png``, in the
    run's directory.

    Returns:
        The path of ``report.md``.
    """
    plots = without_plots() is None
    if plots:
        _plots(directory, runs, rows)
    for run in runs:
        if run.memory is not None:
            data_path, plot_path = memory_paths(directory, run.config.precision)
            run.memory.save(data_path)
            if plots:
                run.memory.plot(plot_path)
    for run, watch in _watched(runs):
        data_path, plot_path = watch_paths(directory, run.config.precision)
        watch.to_json(data_path)
        if plots:
            watch.plot(plot_path)
    data = json.dumps(as_json(settings, corpus, runs, rows, memory), indent=2).encode() + b"\n"
    write_atomically(directory / "report.json", lambda file: file.write(data))
    text = "\n".join(_markdown(settings, corpus, runs, rows, memory, command, plots)).encode() + b"\n"
    write_atomically(directory / "report.md", lambda file: file.write(text))
    return directory / "report.md"


def watch_paths(directory: Path, precision: str) -> tuple[Path, Path]:
    """Files for the rows and the plot of a watched run."""
    run = run_path(directory, precision)
    return run / "watch.json", run / "watch.png"


def memory_paths(directory: Path, precision: str) -> tuple[Path, Path]:
    """Files for the memory profile of a run and its plot."""
    run = run_path(directory, precision)
    return run / "memory.json", run / "memory.png"


def _watched(runs: list[Trainer]) -> list[tuple[Trainer, Watch]]:
    return [(run, run.watch) for run in runs if run.watch is not None and run.watch.rows]


def without_plots() -> str | None:
    """A warning if matplotlib is missing; None otherwise."""
    if find_spec("matplotlib") is not None:
        return None
    return f"the report will have no plots: matplotlib is missing; {sys.executable} -m pip install matplotlib"


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Convert a loss in nats per token to bits per byte of text, which does not depend on the tokenizer."""
    return loss / math.log(2) * len(corpus.held_out) / corpus.held_out_bytes


# -- text ------------------------------------------------------------------------------------------------------------
def _markdown(
    settings: RunSettings,
    corpus: Corpus,
    runs: list[Trainer],
    rows: list[Measurement],
    memory: list[Held],
    command: str,
    plots: bool,
) -> list[str]:
    model = runs[0].model
    parameters = sum(p.numel() for p in model.parameters())
    config = settings.train
    return [
        "# lowbit: a transformer trained in FP8, shipped in INT4",
        "",
        f"A GPT of {parameters / 1e6:.2f} million parameters ({settings.model.layers} layers, width "
        f"{settings.model.dim}), trained from seed {config.seed} on {corpus.origin}: {len(corpus.train):,} tokens, "
        f"{config.steps} steps of {config.batch} x {config.context}. Held out, by document: {len(corpus.held_out):,}.",
        "",
        *_verdicts(runs, rows, memory),
        "## Training",
        "",
        *(["![held-out loss of each run](loss.png)", ""] if plots else []),
        _runs(corpus, runs),
        "",
        *[line for run in runs for line in _remarks(run)],
        "Loss is in nats per token on held-out text, in the precision of the run. All runs start from the same weights "
        "and see the same batches.",
        "",
        "### Memory",
        "",
        *(_memory(memory, config.checkpointing) if memory else _plans(runs)),
        *[line for run, watch in _watched(runs) for line in _cast_errors(run, watch, plots)],
        f"## The {runs[0].config.precision} run, quantized",
        "",
        *(["![perplexity, size and speed of each recipe](recipes.png)", ""] if plots else []),
        _recipes(rows, config.outside),
        "",
        f"Every row is the model that was trained in **{runs[0].config.precision}**, quantized from its fp32 master "
        f"weights without calibration data; embedding, norms and head stay in {config.outside}. Perplexity is per "
        f"token on the same {len(runs[0].windows)} held-out windows. Speed is for one sequence with a KV cache: "
        "medians of interleaved turns.",
        "",
        "## Samples",
        "",
        *[line for row in rows for line in (f"**{row.recipe}**", "", f"> {_quoted(row.sample)}", "")],
        "## How it was made",
        "",
        *[f"- {key}: {value}" for key, value in provenance(command, kernels=processor()).items()],
    ]


def _memory(memory: list[Held], checkpointing: bool) -> list[str]:
    """The memory of runs without a plan."""
    return [
        markdown(explain.HEAD, explain.written(memory), numbers=range(1, len(explain.HEAD))),
        "",
        f"{explain.SAYS} All rows are {'with' if checkpointing else 'without'} gradient checkpointing, and are "
        "measured on separate models.",
        "",
    ]


def _plans(runs: list[Trainer]) -> list[str]:
    return [markdown(planned.HEAD, planned.written(runs), numbers=range(2, len(planned.HEAD))), "", planned.SAYS, ""]


class Claim(NamedTuple):
    """A relative change of a loss, perplexity or peak, and the largest change that is allowed."""

    name: str
    measured: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.allowed

    @property
    def bound(self) -> str:
        """The allowed change in words."""
        return _bound(self.allowed)


def _bound(allowed: float) -> str:
    """A largest change in words: ``at most 1.0% more``, ``at least 25.0% less``, ``no more``."""
    return f"at {'least' if allowed < 0 else 'most'} {share_changed(allowed, 1)}" if allowed else "no more"


def claims(runs: list[Trainer], rows: list[Measurement], memory: list[Held]) -> list[Claim]:
    """The claims that apply to these runs and recipes."""
    first = runs[0]
    losses = [
        Claim(
            f"{run.config.precision} training, held-out loss relative to {first.config.precision}",
            run.history.held_out[-1][1] / first.history.held_out[-1][1] - 1,
            LOSS_TARGET,
        )
        for run in runs[1:]
    ]
    base = baseline(rows, first.config.outside)
    peaks = [
        Claim(
            f"{row.config.precision} training, peak step memory relative to {memory[0].config.precision}",
            row.step / memory[0].step - 1,
            PEAK_TARGETS[row.config.checkpointing],
        )
        for row in memory[1:]
        if row.config.compress_activations and row.config.optimizer == memory[0].config.optimizer
    ] + [
        Claim(f"{run.config.precision} training, peak step memory relative to budget", peak / run.plan.budget - 1, 0.0)
        for run in runs
        if run.plan is not None and (peak := run.history.peak_bytes)
    ]
    return (
        losses
        + peaks
        + [
            Claim(
                f"{row.recipe}, perplexity relative to {base.recipe}", change(row, base), PERPLEXITY_TARGETS[row.recipe]
            )
            for row in rows
            if row.recipe in PERPLEXITY_TARGETS
        ]
    )


def _verdicts(runs: list[Trainer], rows: list[Measurement], memory: list[Held]) -> list[str]:
    verdicts = [
        (claim.name, share_changed(claim.measured, 2), claim.bound, "holds" if claim.holds else "**fails**")
        for claim in claims(runs, rows, memory)
    ]
    return [markdown(("claim", "measured", "allowed", ""), verdicts, numbers=(1, 2)), ""] if verdicts else []


def baseline(rows: list[Measurement], outside: str) -> Measurement:
    """The unquantized model, in the precision of the unquantized parts of the others."""
    return next(row for row in rows if row.recipe == outside)


def change(row: Measurement, base: Measurement) -> float:
    """The relative increase of the perplexity, rounded to 0.01%."""
    return round(row.perplexity / base.perplexity - 1, 4) + 0.0  # -0.0 + 0.0 is 0.0


def _runs(corpus: Corpus, runs: list[Trainer]) -> str:
    base = runs[0].history.held_out[-1][1]

    def row(run: Trainer) -> tuple[str, ...]:
        loss, history = run.history.held_out[-1][1], run.history
        return (
            run.config.precision, run.config.optimizer, f"{loss:.4f}", share_changed(loss / base - 1, 2),
            f"{bits_per_byte(loss, corpus):.3f}", f"{run.tokens_per_second:,.0f}", f"{history.seconds:.1f}",
        )  # fmt: skip

    precision = runs[0].config.precision
    head = ("run", "optimizer", "held-out loss", f"from {precision}", "bits per byte", "tokens/s", "seconds")
    return markdown(head, map(row, runs), numbers=range(2, len(head)))


def _remarks(run: Trainer) -> list[str]:
    """Paragraphs on high-precision blocks, tail and skipped steps of a run."""
    config, history, floats = run.config, run.history, run.config.outside
    remarks = []
    left, low = (set(), set()) if run.prepared is None else map(_blocks, (run.prepared.left, run.prepared.converted))
    if left:
        remarks.append(
            f"computes blocks {', '.join(map(str, sorted(left)))} of {len(left | low)} in {floats}, because its recipe "
            f"leaves out the first and the last blocks"
        )
    if config.tail_begins < config.steps:
        remarks.append(f"computes only in {floats} from step {config.tail_begins:,} on (its tail)")
    if history.skipped:
        remarks.append(
            f"skipped {history.skipped} of {run.step} steps, whose gradients overflowed; its final loss scale is "
            f"{run.scaler.get_scale():g}"
        )
    return [line for remark in remarks for line in (f"The {config.precision} run {remark}.", "")]


def _blocks(names: Iterable[str]) -> set[int]:
    """The numbers of the blocks, from 1, that contain the layers."""
    return {int(name.split(".")[1]) + 1 for name in names if name.startswith("blocks.")}


def _cast_errors(run: Trainer, watch: Watch, plots: bool) -> list[str]:
    """The section of a watched run."""
    precision = run.config.precision
    data, plot = (path.as_posix() for path in watch_paths(Path(), precision))
    return watch.section(f"Quantization error of the {precision} run", data, plot if plots else None)


def _recipes(rows: list[Measurement], outside: str) -> str:
    base = baseline(rows, outside)
    head = ("recipe", "blocks, KiB", "model, KiB", "perplexity", f"from {outside}", "tokens/s")
    cells = (
        (
            row.recipe, f"{row.linear_bytes / 1024:,.0f}", f"{row.bytes / 1024:,.0f}", f"{row.perplexity:.3f}",
            share_changed(change(row, base), 2), f"{row.tokens_per_second:,.0f}",
        )
        for row in rows
    )  # fmt: skip
    return markdown(head, cells, numbers=range(1, len(head)))


def _quoted(text: str) -> str:
    """Escape text for Markdown."""
    for mark in "\\`*_<>[]#|":
        text = text.replace(mark, "\\" + mark)
    return text.strip().replace("\n", "\n> \n> ")


# -- plots -----------------------------------------------------------------------------------------------------------
def _plots(directory: Path, runs: list[Trainer], rows: list[Measurement]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 10, "axes.edgecolor": _PALE, "axes.labelcolor": _INK, "text.color": _INK,
        "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": "#e4e7eb", "axes.axisbelow": True, "figure.dpi": 150,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
        _loss_plot(axes, runs)
        _save(figure, directory / "loss.png")
        figure, axes = plt.subplots(1, 3, figsize=(11, 0.34 * len(rows) + 1.4), sharey=True, layout="constrained")
        _recipe_plot(axes, rows, baseline(rows, runs[0].config.outside))
        _save(figure, directory / "recipes.png")
        plt.close("all")


def _save(figure: Any, path: Path) -> None:
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def _loss_plot(axes: Sequence[Axes], runs: list[Trainer]) -> None:
    top, bottom = axes
    base = dict(runs[0].history.held_out)
    for run, colour in zip(runs, _LINES, strict=False):
        steps, losses = zip(*run.history.held_out, strict=True)
        dashed = "-" if run is runs[0] else "--"
        label = f"{run.config.precision}: {losses[-1]:.4f}"
        top.plot(steps, losses, dashed, color=colour, lw=2, marker="o", ms=4, label=label)
        changes = [100 * (loss / base[step] - 1) for step, loss in run.history.held_out]
        bottom.plot(steps, changes, dashed, color=colour, lw=2)
    top.set_ylabel("held-out loss, nats per token")
    top.set_title("Held-out loss, same seed and same batches", loc="left", weight="bold")
    top.legend(frameon=False, title="run: final loss", alignment="left")
    bottom.axhspan(-100 * LOSS_TARGET, 100 * LOSS_TARGET, color=_GOOD, alpha=0.10, lw=0)
    bottom.set_ylabel(f"% from {runs[0].config.precision}")
    bottom.set_xlabel("step")
    bottom.text(0.995, 0.06, "shaded: within 1%", transform=bottom.transAxes, ha="right", color=_GOOD, size=9)


def _recipe_plot(axes: Sequence[Axes], rows: list[Measurement], base: Measurement) -> None:
    names = [row.recipe for row in rows]
    worse = [change(row, base) for row in rows]
    allowed = [f"  ({_bound(PERPLEXITY_TARGETS[n])})" if n in PERPLEXITY_TARGETS else "" for n in names]
    changes = [f"{share_changed(w, 2)}{a}" for w, a in zip(worse, allowed, strict=True)]
    sizes, speeds = [row.linear_bytes / 1024 for row in rows], [row.tokens_per_second for row in rows]
    panels = [
        (f"perplexity, change from {base.recipe}", worse, changes),
        ("size of the blocks, KiB", sizes, [f"{size:,.0f}" for size in sizes]),
        ("generation, tokens/s", speeds, [f"{speed:,.0f}" for speed in speeds]),
    ]
    for axis, (title, values, labels), colour in zip(axes, panels, _BARS, strict=True):
        colours = [_PALE if name in FLOATS else colour for name in names]
        bars = axis.barh(names, values, color=colours, height=0.66)
        axis.bar_label(bars, labels, padding=4, size=8.5)
        axis.set_title(title, loc="left", weight="bold", size=10)
        axis.margins(x=0.24, y=0.01)
        axis.grid(visible=False)
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.tick_params(left=False, bottom=False, labelbottom=False)
        axis.axvline(0, color=_PALE, lw=1)
    axes[0].invert_yaxis()
