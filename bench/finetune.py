"""Benchmarks fine-tuning within memory budgets: SmolLM2 in lowbit, and in the programs that others use for it.

``lowbit bench finetune --text FILE`` writes finetune.md and finetune.png. Each cell is a way to train (``WAYS``) and a
budget, one line of finetune.jsonl. A run can be stopped at any time; repeated, it goes on with the cells that are
missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lowbit.bench.finetune_ways import LENGTH, LIBRARIES, RANK, ROWS, WAYS, Way, config_of
from lowbit.bench.fit_steps import answer, started
from lowbit.evaluate import models
from lowbit.evaluate.loaders import decoded_gguf
from lowbit.files import read_records, sha256, write_record
from lowbit.finetune.session import TuneConfig
from lowbit.machine import provenance
from lowbit.plan.ladder.cell import MALLOC
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["BUDGETS", "run"]

#: Budgets in MiB, in the order of their cells, steps of a run, and steps of a try.
BUDGETS, STEPS, TRIED = (250, 400, 800, 1536, 3072), 200, 3

#: Directory of the model.
SCRATCH = Path("out/finetune")


class _Bench:
    """The cells of a table.

    Args:
        directory: Directory of the table.
        text: The text.
        steps: Steps of a run.
    """

    def __init__(self, directory: Path, text: Path, steps: int) -> None:
        self.text, self.steps, self.model = text, steps, SCRATCH / "model"
        self.table = directory / f"{_file(steps)}.jsonl"
        self.about: dict[str, Any] = {
            "steps": steps, "text": sha256(text), "rows": ROWS, "length": LENGTH,
            "eval_rows": TuneConfig.eval_rows if steps == STEPS else ROWS,
        }  # fmt: skip

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """The cells that are measured with these settings."""
        return {name: record for name, record in read_records(self.table).items() if record["about"] == self.about}

    def write(self, name: str, record: dict[str, Any]) -> None:
        commit = provenance()["commit"]
        write_record(self.table, name, {"about": self.about, "commit": commit, **record})

    def make_model(self) -> None:
        """Write SmolLM2 in bf16, decoded from its GGUF file, if it is not there."""
        if (self.model / "tokenizer_config.json").exists():
            return
        model, tokenizer = decoded_gguf(models.find("smollm2").location())
        made: Any = model.to(torch.bfloat16)
        made.save_pretrained(self.model)
        tokenizer.save_pretrained(self.model)

    def ask(self, task: str, way: Way, steps: int, **arguments: Any) -> dict[str, Any]:
        """The answer of a process of ``finetune_ways``."""
        question = {
            "task": task, "way": way.name, "model": str(self.model), "text": str(self.text.resolve()),
            "config": asdict(config_of(way, steps, self.about["eval_rows"])), "budget": None, "plan": None,
            "variant": 0, **arguments,
        }  # fmt: skip
        process = started("finetune_ways", [question], MALLOC)
        if process.returncode < 0 and question["budget"] is not None:
            return {"fits": False, "why": "memory ran out in a library, which ended the process"}
        return answer(process)

    # -- cells ---------------------------------------------------------------------------------------------------------
    def reference(self, adapters: int) -> dict[str, Any]:
        """Plain training in fp32 without a limit."""
        way = next(one for one in WAYS if one.adapters == adapters and not one.variants)
        return self.ask("measure", way, self.steps)

    def cell(self, way: Way, mib: int) -> dict[str, Any]:
        """A way within a budget: a plan of lowbit, or the first variant of others that runs."""
        if way.package is not None and find_spec(way.package) is None:
            return {"fits": False, "why": f"{way.package} is not installed"}
        budget = mib << 20
        return self._planned(way, budget) if not way.variants else self._of_others(way, budget)

    def _planned(self, way: Way, budget: int) -> dict[str, Any]:
        plan = self.ask("plan", way, self.steps, budget=budget)
        if not plan["fits"]:
            return plan
        known = {name: plan[name] for name in ("settings", "predicted")}
        same = self._same(way, plan["settings"])
        return {**known, **(same or self._measured(way, self.steps, budget=budget, plan=plan["plan"]))}

    def _of_others(self, way: Way, budget: int) -> dict[str, Any]:
        reasons = {}
        for number, variant in enumerate(way.variants):
            same = self._same(way, variant.name)
            if same is not None:
                return {"settings": variant.name, **same}
            found = self._measured(way, min(TRIED, self.steps), budget=budget, variant=number)
            if found["fits"] and self.steps > TRIED:
                found = self._measured(way, self.steps, budget=budget, variant=number)
            if found["fits"]:
                return {"settings": variant.name, **found}
            reasons[variant.name] = found["why"]
        why = "; ".join(dict.fromkeys(reasons.values()))
        return {"fits": False, "why": f"{why}, with each of {len(reasons)} variants", "reasons": reasons}

    def _measured(self, way: Way, steps: int, **arguments: Any) -> dict[str, Any]:
        """A run. One that fails for another reason than memory does not run either, and the page says why."""
        try:
            return self.ask("measure", way, steps, **arguments)
        except RuntimeError as error:
            return {"fits": False, "why": str(error).strip().splitlines()[-1][-300:]}

    def _same(self, way: Way, settings: str) -> dict[str, Any] | None:
        """The measurement of the same settings within a smaller budget, which has the same bits."""
        for mib in BUDGETS:
            record = self.records.get(_name(way, mib))
            if record is not None and record.get("fits") and record["settings"] == settings:
                kept = ("fits", "peak", "seconds", "processor_seconds", "held_out", "before", "ended")
                same = {key: record[key] for key in kept if key in record}
                return {**same, "measured_within": record.get("measured_within", mib)}
        return None


def _name(way: Way, mib: int) -> str:
    return f"{way.name}, {mib} MiB"


def _plain(adapters: int) -> str:
    return f"plain fp32 without a limit, {'adapters' if adapters else 'all weights'}"


def _file(steps: int) -> str:
    """The name of the table and the page; runs of other steps do not replace those of ``STEPS``."""
    return "finetune" if steps == STEPS else f"finetune-{steps}-steps"


def run(directory: Path, text: Path, only: str = "", quick: bool = False) -> Path:
    """Measure the missing cells, and write ``finetune.md`` after each.

    Args:
        directory: Directory of the results.
        text: UTF-8 text to train on. Its last twentieth is held out.
        only: Regular expression for the names of the cells.
        quick: Whether runs have three steps; the names of the files say so.
    """
    directory.mkdir(parents=True, exist_ok=True)
    bench = _Bench(directory, text, TRIED if quick else STEPS)
    bench.make_model()
    cells: dict[str, Callable[[], dict[str, Any]]] = {
        **{_plain(adapters): partial(bench.reference, adapters) for adapters in (0, RANK)},
        **{_name(way, mib): partial(bench.cell, way, mib) for mib in BUDGETS for way in WAYS},
    }
    for name, measure in cells.items():
        if name not in bench.records and re.search(only, name):
            bench.write(name, measure())
            _write_page(bench, directory)
    return _write_page(bench, directory)


# -- the page ----------------------------------------------------------------------------------------------------------
def _write_page(bench: _Bench, directory: Path) -> Path:
    records, name = bench.records, _file(bench.steps)
    about = provenance(
        "lowbit bench finetune --text FILE", packages=("transformers", "peft", "bitsandbytes", "torchao")
    )
    commits = Counter(record["commit"] for record in records.values())
    has_plot = _plot(records, directory / f"{name}.png")
    path = directory / f"{name}.md"
    lines = [
        "# Fine-tuning within a memory budget\n",
        *(f"- {key}: {value}" for key, value in about.items()),
        f"- commits of the measurements: {', '.join(f'{commit} ({count})' for commit, count in commits.items())}",
        f"\nSmolLM2-135M-Instruct in bf16, {bench.steps} steps of {ROWS} x {LENGTH} tokens of {bench.text.name}, on "
        f"all weights or on adapters of rank {RANK}. Rows, learning rates and clipping are the same everywhere; the "
        f"last twentieth of the text is held out. A process may hold the budget, and {amount(LIBRARIES)} "
        f"for libraries, above what it holds before the model is loaded; the limit (RLIMIT_DATA) is set once the model "
        f"is prepared. lowbit plans for the budget. Others run "
        f"the first of their variants that the limit allows: fp32 before bf16, whole batches before parts, and parts "
        f"before checkpointing. "
        f"Measured is the largest resident memory of the process, with pages of files. Settings that are the "
        f"same as within a smaller budget are measured once.\n",
        *(_references(records)),
        *([f"![Held-out loss and speed by budget]({name}.png)\n"] if has_plot else []),
        _table(records),
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def _references(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    for adapters in (0, RANK):
        record = records.get(_plain(adapters))
        if record is not None:
            yield (
                f"- {_plain(adapters)}: held-out loss {record['before']:.4f} before and {record['held_out']:.4f} "
                f"after, {amount(record['peak'])}, {_speed(record):,.0f} tokens/s"
            )
    yield ""


def _speed(record: dict[str, Any]) -> float:
    return ROWS * LENGTH / record["seconds"]


def _loss(records: dict[str, dict[str, Any]], way: Way, record: dict[str, Any]) -> float | None:
    """The held-out loss minus that of plain training in fp32."""
    plain = records.get(_plain(way.adapters))
    return None if plain is None else record["held_out"] - plain["held_out"]


def _table(records: dict[str, dict[str, Any]]) -> str:
    rows = []
    for way in WAYS:
        for mib in reversed(BUDGETS):
            record = records.get(_name(way, mib))
            if record is None:
                continue
            if not record["fits"]:
                rows.append((way.name, amount(mib << 20), f"does not run: {record['why']}", *[""] * 5))
                continue
            loss, settings, ended = _loss(records, way, record), record["settings"], record.get("ended")
            rows.append((
                way.name, amount(mib << 20),
                settings if ended in (None, settings) else f"{settings}; memory ran out, went on with: {ended}",
                amount(record["predicted"]) if "predicted" in record else "", amount(record["peak"]),
                f"{_speed(record):,.0f}", f"{record['processor_seconds']:.1f}",
                "" if loss is None else f"{loss:+.4f}",
            ))  # fmt: skip
    head = (
        "trained by", "budget", "settings", "predicted", "measured", "tokens/s", "processor s per step",
        "loss minus plain fp32",
    )  # fmt: skip
    return markdown(head, rows, numbers=range(3, len(head)))


def _plot(records: dict[str, dict[str, Any]], path: Path) -> bool:
    """Plot speed and loss by budget, a line per way. False without matplotlib or measurements."""
    lines = [
        (way, [(mib, record) for mib in BUDGETS if (record := records.get(_name(way, mib), {})).get("fits")])
        for way in WAYS
    ]
    if find_spec("matplotlib") is None or not any(points for _, points in lines):
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speeds, losses) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for way, points in lines:
        if not points:
            continue
        style: dict[str, Any] = {
            "marker": "o", "linewidth": 2.5 if not way.variants else 1, "linestyle": "--" if way.adapters else "-",
        }  # fmt: skip
        speeds.plot([mib for mib, _ in points], [_speed(record) for _, record in points], label=way.name, **style)
        compared = [(mib, loss) for mib, record in points if (loss := _loss(records, way, record)) is not None]
        if compared:
            losses.plot(*zip(*compared, strict=True), **style)
    for axis, title in ((speeds, "tokens/s"), (losses, "held-out loss minus plain fp32, nats per token")):
        axis.set(xscale="log", xlabel="budget, MiB", title=title)
        axis.set_xticks(BUDGETS, [str(mib) for mib in BUDGETS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
