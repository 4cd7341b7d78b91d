"""What ``lb.fit`` promises beside what training by its plans holds and takes.

``lowbit bench fit`` writes fit.md: predictions of 40 configurations; falling budgets for three models, in processes
under a real limit; and a plan beside everything that it could have chosen. Each measurement is kept in a file below
``fit/`` beside it, and is not repeated. All of them take about an hour.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit as lb
from lowbit.bench.memory import SUBJECTS, Subject, storages
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.machine import provenance
from lowbit.memory.measure import allocations
from lowbit.memory.offload.mapped import is_mapped
from lowbit.memory.shortage import ran_out
from lowbit.plan import Plan
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.fitting.search import fits
from lowbit.plan.fitting.subject import subject_of
from lowbit.plan.ladder.cell import MALLOC
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.settings import Settings
from lowbit.tables import markdown

#: Steps after the first, whose median time is taken.
_STEPS = 5
#: Steps whose peak is measured.
_WATCHED = 3
#: What a plan is asked for, for each model of ``lowbit bench memory``: a share of plain training, and what it keeps.
_ASKED = ((100, ("fp32",)), (60, ("bf16",)), (50, ("fp8",)), (30, ()))


def _tokens(rows: int, length: int) -> Any:
    return torch.randint(1024, (rows, length), generator=torch.Generator().manual_seed(0))


#: Three models for falling budgets.
_FALLING = (
    Subject("GPT, 6 layers of 512",
            lambda: GPT(GPTConfig(vocab=1024, layers=6, heads=8, dim=512, hidden=1536)), lambda: _tokens(8, 256), ()),
    *(subject for subject in SUBJECTS if subject.name in ("Llama, 4 layers of 576", "MiniLM, 6 layers of 384")),
)  # fmt: skip
_BUDGETS = 20

#: The space of which everything is measured: names of each dimension, and parts of a batch.
_SPACE = {
    "precision": ("fp32", "bf16"), "attention": ("own attention",), "loss": ("own loss",),
    "optimizer": ("adamw", "adamw8bit"), "masters": ("residual",),
    "checkpoint": ("everything kept", "save_matmuls", "block"), "states": ("memory",),
    "activations": ("activations in memory",), "weights": ("weights in memory",),
    "parts of a batch": ("whole batch", "parts"),
}  # fmt: skip
_SPACE_BUDGETS = (90, 70, 50, 35, 25)
_ROUNDS = 3


@dataclass(frozen=True)
class Held:
    """``peak``: bytes of torch's allocator in a step, and of pages of weights in files. ``seconds``: of a step."""

    peak: int
    seconds: float


def measured(plan: Plan, subject: Subject, steps: int = _STEPS) -> Held:
    """Of training by ``plan`` in this process: a step for the states, some under the allocator, since what lies
    elsewhere comes and goes beside them, then ``steps``.
    """
    with _training(plan, subject) as (training, batch):
        gc.collect()
        states = [t for s in training.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        there = [*training.model.parameters(), *training.model.buffers(), *states]
        before = storages([[t for t in there if not is_mapped(t)], batch])
        peak = before + _peak(lambda: [training.step(batch) for _ in range(_WATCHED)], plan.settings.offload_weights)
        return Held(peak, _timed(training, batch, steps))


def _peak(run: Callable[[], object], mapped: bool) -> int:
    """The most bytes that ``run()`` holds at a time: of the allocator, and with ``mapped`` of pages of scratch files
    too, which the system is asked about every two milliseconds.
    """
    if not mapped:
        return lb.memory.allocated_peak(run, "cpu")
    pages, done = [(time.time_ns(), _mapped_now())], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            pages.append((time.time_ns(), _mapped_now()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        changes = allocations(run)
    finally:
        done.set()
        thread.join()
    held, there, peak = 0, 0, 0
    moments = [*((when, True, size) for when, size in pages), *((when, False, size) for when, size in changes)]
    for _, of_pages, size in sorted(moments):
        held, there = (held, size) if of_pages else (held + size, there)
        peak = max(peak, held + there)
    return peak


def _mapped_now() -> int:
    ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[:1].isupper():  # where a mapping lies, and of which file
            ours = "lowbit-offload-" in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def trained(plan: Plan, subject: Subject, steps: int) -> tuple[float, bool]:
    """The time of a step, without torch's profiler, which takes memory for each op that it sees; and whether the run
    had to take less memory than planned.
    """
    with _training(plan, subject) as (training, batch):
        return _timed(training, batch, steps), training.settings != plan.settings


@contextmanager
def _training(plan: Plan, subject: Subject) -> Iterator[tuple[Any, Any]]:
    """The run of a plan after a step, and its batch."""
    torch.manual_seed(0)
    model, batch = subject.make(), subject.batch()
    with tempfile.TemporaryDirectory(prefix="lowbit-fit-") as directory:
        training = plan.apply_(model, directory=directory)
        training.step(batch)
        yield training, batch
        training.optimizer.state.clear()  # files of states go before their directory does


def _timed(training: Any, batch: Any, steps: int) -> float:
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        training.step(batch)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


class _Cells:
    """Measurements that are kept, each in a file of the directory, with the commit that it was made by."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory, self.commit, self.used = directory, commit, dict[str, str]()
        directory.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        path = self.directory / f"{''.join(c if c.isalnum() else '-' for c in name.lower())}.json".replace("--", "-")
        if not path.exists():
            path.write_text(json.dumps({"cell": name, "commit": self.commit, **make()}) + "\n")
        found: dict[str, Any] = json.loads(path.read_text())
        self.used[name] = found.get("commit", "unknown")
        return found

    def commits(self) -> str:
        """How many measurements are of each commit."""
        counts = Counter(self.used.values()).items()
        return ", ".join(f"{commit} ({count})" for commit, count in counts)


# -- predictions ------------------------------------------------------------------------------------------------------
def _predictions(cells: _Cells) -> str:
    rows = []
    for subject, (share, keep) in itertools.product(SUBJECTS, _ASKED):

        def make(subject: Subject = subject, share: int = share, keep: tuple[str, ...] = keep) -> dict[str, Any]:
            begin = time.perf_counter()
            try:
                plan = lb.fit(subject.make(), subject.batch(), f"{share}%", keep=keep)
            except ValueError as error:
                return {"refused": str(error)}
            planning, held = time.perf_counter() - begin, measured(plan, subject)
            return {
                "settings": words(plan.settings), "budget": plan.budget, "peak": plan.peak_bytes,
                "seconds": plan.seconds, "held": held.peak, "took": held.seconds, "planning": planning,
            }  # fmt: skip

        rows.append((subject, share, keep, cells(f"{subject.name} {share}% {' '.join(keep)}", make)))
    refused = [cell for *_, cell in rows if "refused" in cell]
    there = [row for row in rows if "refused" not in row[-1]]
    sizes = [abs(cell["peak"] / cell["held"] - 1) for *_, cell in there]
    times = [abs(cell["seconds"] / cell["took"] - 1) for *_, cell in there]
    head = ("model", "budget", "keep", "plan", "predicted, MiB", "held", "off by", "predicted, ms", "took", "off by",
            "planning, s")  # fmt: skip
    table = [
        (subject.name, f"{share}%", ", ".join(keep), cell["settings"],
         f"{cell['peak'] / 2**20:.1f}", f"{cell['held'] / 2**20:.1f}", f"{cell['peak'] / cell['held'] - 1:+.1%}",
         f"{1e3 * cell['seconds']:.0f}", f"{1e3 * cell['took']:.0f}", f"{cell['seconds'] / cell['took'] - 1:+.0%}",
         f"{cell['planning']:.0f}")
        for subject, share, keep, cell in there
    ]  # fmt: skip
    return "\n".join([
        "## Predicted and measured\n",
        f"{len(there)} plans, and {len(refused)} budgets that nothing fits. Held is the peak of torch's allocator in "
        f"{_WATCHED} steps, parameters, states and batch included; times are medians of {_STEPS} steps.\n",
        f"- the peak is off by {statistics.median(sizes):.2%} in the median, {max(sizes):.2%} at most",
        f"- the time is off by {statistics.median(times):.0%} in the median, {max(times):.0%} at most, and by at most "
        f"20% in {sum(one <= 0.2 for one in times)} of {len(times)}\n",
        markdown(head, table, numbers=range(4, len(head))),
    ])  # fmt: skip


# -- falling budgets --------------------------------------------------------------------------------------------------
def _budgets(most: int, least: int) -> list[int]:
    """From plain training down, evenly by ratio."""
    return [int(most * (least / most) ** (number / (_BUDGETS - 1))) for number in range(_BUDGETS)]


def _falling(cells: _Cells) -> str:
    parts = []
    for subject in _FALLING:
        for number, plan in enumerate(_plans(cells, subject)):

            def make(subject: Subject = subject, plan: Plan = plan) -> dict[str, Any]:
                limit = int(1.03 * plan.budget) + _beside(cells, subject, plan.settings)
                return {
                    "budget": plan.budget, "peak": plan.peak_bytes, "settings": words(plan.settings),
                    **_limited(subject, plan, limit), "plain": _limited(subject, None, limit)["held"],
                }  # fmt: skip

            cells(f"{subject.name} budget {number}", make)
        rows = [cells(f"{subject.name} budget {number}", dict) for number in range(number + 1)]
        held = [row["held"] for row in rows]
        over = max(row["held"] / row["budget"] - 1 for row in rows if row["held"])
        there = [size for size in held if size]
        adapted = sum(row.get("adapted", False) for row in rows)
        risen = [later / earlier - 1 for earlier, later in itertools.pairwise(there) if later > earlier]
        head = ("budget, MiB", "plan", "predicted", "held", "step, ms", "plain training")
        table = [
            (f"{row['budget'] / 2**20:.1f}", row["settings"], f"{row['peak'] / 2**20:.1f}",
             f"{row['held'] / 2**20:.1f}" if row["held"] else "ran out", f"{1e3 * row['took']:.0f}",
             "fits" if row["plain"] else "runs out")
            for row in rows
        ]  # fmt: skip
        parts += [
            f"### {subject.name}\n",
            f"- runs by plans that ran out of memory: {held.count(0)} of {len(rows)}, and {adapted} took less than "
            f"planned to go on; plain training ran out under {sum(not row['plain'] for row in rows)} of these limits",
            f"- held is at most {over:+.1%} of the budget; where the budget fell, it rose "
            + (f"{len(risen)} times, by at most {max(risen):.1%}\n" if risen else "never\n"),
            markdown(head, table, numbers=(0, 2, 3, 4)),
        ]
    about = (
        f"{_BUDGETS} budgets for each of three models, from plain training down to what hardly fits. Each plan trains "
        f"in a process of its own whose memory is limited (RLIMIT_DATA) to 1.03 times the budget and what libraries "
        f"keep for themselves when training is over, as measured without a limit for the same precision or recipe and "
        f"nothing else. Plain training is tried under the same limit. What is held is measured when the limit is gone, "
        f"since torch's profiler takes memory itself."
    )
    return "\n".join(["## Falling budgets under a real limit\n", about + "\n", *parts])


def _plans(cells: _Cells, subject: Subject) -> Iterator[Plan]:
    """Of falling budgets, kept as files of this commit."""
    name = f"plan-{cells.commit}-{_FALLING.index(subject)}"
    paths = [cells.directory / f"{name}-{number}.json" for number in range(_BUDGETS)]
    if not all(path.exists() for path in paths):
        model, batch = subject.make(), subject.batch()
        most = lb.fit(model, batch, "100%", keep=("fp32", "adamw", "everything kept"), no=("disk",)).plain.peak_bytes
        least = _least(model, batch)
        for path, plan in zip(paths, fits(model, batch, _budgets(most, int(1.02 * least))), strict=True):
            plan.save(path)
    for path in paths:
        yield Plan.load(path)


def _beside(cells: _Cells, subject: Subject, settings: Settings) -> int:
    """What libraries take for themselves, which no allocator counts and no technique changes: kernels that are made for
    the shapes and the precision at hand.
    """
    only = Settings(mixed=settings.mixed, recipe=settings.recipe, compress=settings.compress)
    found = cells(f"{subject.name} {words(only)}, no limit", lambda: _limited(subject, _by(only, subject), None))
    return int(found["kept"])


def _least(model: nn.Module, batch: Any) -> int:
    """The smallest peak of any plan."""
    return min(one.peak_bytes for one in lb.fit(model, batch, "100%").frontier)


def _limited(subject: Subject, plan: Plan | None, limit: int | None) -> dict[str, Any]:
    """Train in a process of its own. ``held``: 0 where memory ran out. ``kept``: what the limit counts of the process
    when training is over, beyond what it had before.
    """
    settings = None if plan is None else plan.as_dict()
    asked = json.dumps([subject.name, settings, limit])
    threads = {name: str(torch.get_num_threads()) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", "lowbit.bench.fit"], input=asked, capture_output=True, text=True,
        env={**os.environ, **threads, **MALLOC},
    )  # fmt: skip
    if limit is not None and done.returncode < 0:  # a library that does not look whether it was given memory
        return {"held": 0, "took": 0.0, "kept": 0}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"fit: a process ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    """The process: what is asked for comes as JSON, what it holds goes out."""
    name, plan, limit = json.loads(sys.stdin.read())
    subject = next(one for one in _FALLING if one.name == name)
    with tempfile.TemporaryDirectory(prefix="lowbit-fit-") as directory:
        path = Path(directory) / "plan.json"
        if plan is None:
            chosen = _by(Settings(), subject)
        else:
            path.write_text(json.dumps(plan))
            chosen = Plan.load(path)
        small = subject._replace(batch=lambda: _first_rows(subject.batch()))
        for settings in (Settings(), Settings(offload_activations=True)):
            trained(_by(settings, subject), small, 1)  # what libraries keep, and threads, are there from here on
        gc.collect()
        limits = LIMITS["cpu"]
        before = limits.counted()
        try:
            with nullcontext() if limit is None else limits.within(limit):
                took, adapted = trained(chosen, subject, 3)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) and not ran_out(error.__cause__ or error.__context__ or error):
                raise
            print(json.dumps({"held": 0, "took": 0.0, "kept": 0}))
            return
        gc.collect()
        kept = max(limits.counted() - before, 0)
        held = measured(chosen, subject, 1).peak
        print(json.dumps({"held": held, "took": took, "kept": kept, "adapted": adapted}))


def _first_rows(batch: Any) -> Any:
    return {key: value[:1] for key, value in batch.items()} if isinstance(batch, dict) else batch[:1]


def _by(settings: Settings, subject: Subject) -> Plan:
    """A plan of these settings for a subject, whatever the budget."""
    one = Prediction(settings, 1, 1.0)
    return Plan(one, 1 << 50, one, [one], subject=subject_of(subject.make(), None))


# -- everything -------------------------------------------------------------------------------------------------------
def _everything(cells: _Cells) -> str:
    """A plan's time beside the best of all settings of a space, as measured."""
    subject = next(one for one in SUBJECTS if one.name == "GPT, 6 layers of 384")
    subject = subject._replace(batch=lambda: _tokens(8, 256))
    space = [
        Settings(checkpoint=checkpoint, mixed=mixed, bits=bits, micro=micro)
        for mixed, bits, checkpoint, micro in itertools.product(
            (None, "bf16"), (32, 8), (None, "save_matmuls", "block"), (1, 2, 4)
        )
    ]

    def make() -> dict[str, Any]:
        taken: list[list[Held]] = [[] for _ in space]
        for _ in range(_ROUNDS):  # all take turns
            for index, settings in enumerate(space):
                taken[index].append(measured(_by(settings, subject), subject, 3))
        return {"peaks": [max(h.peak for h in held) for held in taken],
                "times": [min(h.seconds for h in held) for held in taken]}  # fmt: skip

    found = cells(f"{subject.name} everything", make)
    known = {name for names in _SPACE.values() for name in names}
    choices = [c.name for dimension, row in lb.plan.fitting.CHOICES.items() if dimension != "way" for c in row]
    left_out = [name for name in choices if name not in known]
    by_settings = {s: (p, t) for s, p, t in zip(space, found["peaks"], found["times"], strict=True)}
    plain = by_settings[Settings()][0]
    rows, ratios = [], []
    shares = [f"{share}%" for share in _SPACE_BUDGETS]
    for plan in fits(subject.make(), subject.batch(), shares, no=left_out):
        fitting = {s: t for s, (p, t) in by_settings.items() if p <= plan.budget}
        best = min(fitting, key=fitting.__getitem__)
        ratios.append(by_settings[plan.settings][1] / fitting[best])
        rows.append((f"{plan.budget / plain:.0%}", words(plan.settings), f"{1e3 * by_settings[plan.settings][1]:.0f}",
                     words(best), f"{1e3 * fitting[best]:.0f}", f"{ratios[-1]:.3f}"))  # fmt: skip
    head = ("budget", "plan", "takes, ms", "the best that fits", "takes, ms", "ratio")
    return "\n".join([
        "## Beside everything\n",
        f"{subject.name}, 8 x 256 tokens: all {len(space)} combinations of precision, optimizer, checkpoints and "
        f"parts are measured in turns, {_ROUNDS} times. The plan's time is at most {max(ratios):.3f} of the best that "
        f"fits.\n",
        markdown(head, rows, numbers=(2, 4, 5)),
    ])  # fmt: skip


def run(directory: Path) -> Path:
    """Measure what is not there yet, and write ``fit.md``."""
    about = provenance(packages=("transformers",))
    cells = _Cells(directory / "fit", about["commit"])
    parts = [_predictions(cells), _everything(cells), _falling(cells)]
    path = directory / "fit.md"
    path.write_text("\n".join([
        "# Plans within a budget: promised and measured\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"- commits that measurements were made by, and how many: {cells.commits()}", "", "\n\n".join(parts), "",
    ]))  # fmt: skip
    return path


if __name__ == "__main__":
    main()
