"""Compares predictions of ``lb.fit`` with the measured memory and time of training by its plans.

``lowbit bench fit`` writes fit.md: predictions of 40 configurations; decreasing budgets for six models, in processes
with an enforced limit; and one plan compared with all its alternatives. Each measurement is stored in a file under
``fit/`` and is not repeated. All of them take about an hour.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import lowbit as lb
from lowbit.bench import falling
from lowbit.bench.fit_steps import STEPS, WATCHED, Cells, Held, by, measured
from lowbit.bench.memory import SUBJECTS, Subject
from lowbit.bench.resident import resident
from lowbit.machine import provenance
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.search import fits
from lowbit.plan.settings import TrainingSettings
from lowbit.tables import markdown

#: Requests for each model of ``lowbit bench memory``: percent of plain training's memory, and ``require``.
_ASKED = ((100, ("fp32",)), (60, ("bf16",)), (50, ("fp8",)), (30, ()))


#: The space of settings that are all measured: names by dimension. The other dimensions keep their first technique.
_SPACE = {
    "precision": ("fp32", "bf16"), "optimizer": ("adamw", "adamw8bit"),
    "checkpoint": ("everything kept", "save_matmuls", "block"), "micro-batches": ("whole batch", "micro-batches"),
}  # fmt: skip
_SPACE_BUDGETS = (90, 70, 50, 35, 25)
_ROUNDS = 3


# -- predictions ------------------------------------------------------------------------------------------------------
def _predictions(cells: Cells) -> str:
    rows = []
    for subject, (share, keep) in itertools.product(SUBJECTS, _ASKED):

        def make(subject: Subject = subject, share: int = share, keep: tuple[str, ...] = keep) -> dict[str, Any]:
            begin = time.perf_counter()
            try:
                plan = lb.fit(subject.make(), subject.batch(), f"{share}%", require=keep)
            except ValueError as error:
                return {"refused": str(error)}
            planning, held = time.perf_counter() - begin, measured(plan, subject)
            return {
                "settings": words(plan.settings), "budget": plan.budget, "peak": plan.peak_bytes,
                "seconds": plan.seconds, "held": held.peak, "took": held.seconds, "planning": planning,
                "resident": resident(plan, subject),
            }  # fmt: skip

        rows.append((subject, share, keep, cells(f"{subject.name} {share}% {' '.join(keep)}", make)))
    refused = [cell for *_, cell in rows if "refused" in cell]
    there = [row for row in rows if "refused" not in row[-1]]
    sizes = [abs(cell["peak"] / cell["held"] - 1) for *_, cell in there]
    times = [abs(cell["seconds"] / cell["took"] - 1) for *_, cell in there]
    over = sorted(cell["held"] / cell["budget"] - 1 for *_, cell in there)
    beside = [cell["resident"] / cell["held"] - 1 for *_, cell in there]
    head = ("model", "budget", "keep", "plan", "predicted, MiB", "held", "off by", "resident", "more than held",
            "predicted, ms", "took", "off by", "planning, s")  # fmt: skip
    table = [
        (subject.name, f"{share}%", ", ".join(keep), cell["settings"],
         f"{cell['peak'] / 2**20:.1f}", f"{cell['held'] / 2**20:.1f}", f"{cell['peak'] / cell['held'] - 1:+.1%}",
         f"{cell['resident'] / 2**20:.1f}", f"{cell['resident'] / cell['held'] - 1:+.1%}",
         f"{1e3 * cell['seconds']:.0f}", f"{1e3 * cell['took']:.0f}", f"{cell['seconds'] / cell['took'] - 1:+.0%}",
         f"{cell['planning']:.0f}")
        for subject, share, keep, cell in there
    ]  # fmt: skip
    return "\n".join([
        "## Predicted and measured\n",
        f"{len(there)} plans, and {len(refused)} budgets that nothing fits. Held is the peak of torch's allocator in "
        f"{WATCHED} steps, parameters, states and batch included; times are medians of {STEPS} steps. "
        f"Resident is the peak of the process in its first steps, above its imports.\n",
        f"- within the budget: {sum(one <= 0 for one in over)} of {len(over)}; the largest is {over[-1]:+.2%} of it",
        f"- the peak is off by {statistics.median(sizes):.2%} in the median, {max(sizes):.2%} at most",
        f"- the process holds {statistics.median(beside):+.1%} of the allocator's peak in the median, from "
        f"{min(beside):+.1%} to {max(beside):+.1%}",
        f"- the time is off by {statistics.median(times):.0%} in the median, {max(times):.0%} at most, and by at most "
        f"20% in {sum(one <= 0.2 for one in times)} of {len(times)}\n",
        markdown(head, table, numbers=range(4, len(head))),
    ])  # fmt: skip


# -- all settings of a space ------------------------------------------------------------------------------------------
def _everything(cells: Cells) -> str:
    """The measured time of a plan, compared with the best of all settings of a space."""
    subject = next(one for one in SUBJECTS if one.name == "GPT, 6 layers of 384")
    subject = subject._replace(batch=lambda: falling.tokens(1024, 8, 256))
    space = [
        TrainingSettings(checkpoint=checkpoint, precision=mixed, bits=bits, micro_batches=micro)
        for mixed, bits, checkpoint, micro in itertools.product(
            (None, "bf16"), (32, 8), (None, "save_matmuls", "block"), (1, 2, 4)
        )
    ]

    def in_turns(several: list[TrainingSettings]) -> dict[str, Any]:
        taken: list[list[Held]] = [[] for _ in several]
        for _ in range(_ROUNDS):
            for index, settings in enumerate(several):
                taken[index].append(measured(by(settings, subject), subject, 3))
        return {"peaks": [max(h.peak for h in held) for held in taken],
                "times": [min(h.seconds for h in held) for held in taken]}  # fmt: skip

    found = cells(f"{subject.name} everything", lambda: in_turns(space))
    left_out = [
        technique.name for dimension, row in lb.plan.TECHNIQUES.items() if dimension != "strategy"
        for technique in row if technique.name not in _SPACE.get(dimension, (row[0].name,))
    ]  # fmt: skip
    by_settings = {s: (p, t) for s, p, t in zip(space, found["peaks"], found["times"], strict=True)}
    plain = by_settings[TrainingSettings()][0]
    rows, ratios = [], []
    shares = [f"{share}%" for share in _SPACE_BUDGETS]
    for plan in fits(subject.make(), subject.batch(), shares, exclude=left_out):
        fitting = {s: t for s, (p, t) in by_settings.items() if p <= plan.budget}
        best = min(fitting, key=fitting.__getitem__)
        if plan.settings in by_settings:
            seconds, least = by_settings[plan.settings][1], fitting[best]
        else:  # more micro-batches than in the space
            pair = [plan.settings, best]
            seconds, least = cells(f"{' beside '.join(map(words, pair))}", partial(in_turns, pair))["times"]
        ratios.append(seconds / least)
        rows.append((f"{plan.budget / plain:.0%}", words(plan.settings), f"{1e3 * seconds:.0f}",
                     words(best), f"{1e3 * least:.0f}", f"{ratios[-1]:.3f}"))  # fmt: skip
    head = ("budget", "plan", "takes, ms", "the best that fits", "takes, ms", "ratio")
    return "\n".join([
        "## Beside everything\n",
        f"{subject.name}, 8 x 256 tokens: all {len(space)} combinations of precision, optimizer, checkpoints and "
        f"parts are measured in turns, {_ROUNDS} times. The plan's time is at most {max(ratios):.3f} of the best that "
        f"fits.\n",
        markdown(head, rows, numbers=(2, 4, 5)),
    ])  # fmt: skip


def run(directory: Path) -> Path:
    """Run the missing measurements, and write ``fit.md`` after each part."""
    about = provenance(packages=("transformers",))
    cells = Cells(directory / "fit", about["commit"])
    path, parts = directory / "fit.md", list[str]()
    for part in itertools.chain([_predictions(cells), _everything(cells)], falling.tables(cells)):
        parts.append(part)
        path.write_text("\n".join([
            "# Plans within a budget: promised and measured\n",
            *(f"- {name}: {value}" for name, value in about.items()),
            f"- commits that measurements were made by, and how many: {cells.commits()}", "", "\n\n".join(parts), "",
        ]))  # fmt: skip
    return path
