"""Records final training losses with error bars: runs of the demo's GPT and of a larger one, over paired seeds.

``lowbit bench evidence --out bench/results`` trains the cells of ``evidence_cells`` that are not recorded, in order,
and writes evidence.md after each. ``python -m lowbit.bench.evidence report`` only writes the page. The record is
``evidence/STUDY.jsonl``, one line per finished cell. A stopped run resumes from ``out/evidence``, bit-identical to an
uninterrupted run. All cells take days: stop with SIGTERM and call again.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import re
import shutil
import statistics
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import recipes
from lowbit.bench import evidence_page
from lowbit.bench.evidence_cells import Cell, cells
from lowbit.demo import text
from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPT
from lowbit.demo.loop import TrainConfig, Trainer
from lowbit.demo.step import evaluate
from lowbit.interrupts import Interrupted
from lowbit.machine import multiplies, provenance
from lowbit.recipes import Recipe

__all__ = ["record", "run", "train"]

#: Directory for the states of unfinished runs.
SCRATCH = Path("out/evidence")
#: Points of a recorded training-loss curve (each a mean over steps), and the number of steps of the final mean.
POINTS, LAST = 30, 100
#: The most held-out windows.
WINDOWS = 400


# -- texts -------------------------------------------------------------------------------------------------------------
def _package(name: str, kind: Callable[[Path], str], below: str = "") -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["purelib"]) / name
    for path in sorted((root / below).rglob("*.py")):
        yield f"{name}/{path.relative_to(root).as_posix()}", kind(path)


def _source_documents() -> Iterator[text.Document]:
    """Sources of torch and sympy (a dependency of torch), without paragraphs of earlier files."""
    seen: set[str] = set()
    read = partial(Path.read_text, encoding="utf-8", errors="ignore")
    for package in ("torch", "sympy"):
        for name, source in _package(package, read):
            fresh = [part for part in dict.fromkeys(re.split(r"\n\s*\n", source)) if part not in seen]
            seen.update(fresh)
            yield text.Document(name, tuple(fresh))


#: By name: makes the training text of a study, given a number of tokens.
TEXTS: dict[str, Callable[[int], Corpus]] = {
    "documentation": lambda vocab: Corpus.load(None, vocab),
    "sources": lambda vocab: Corpus.build(list(_source_documents()), vocab, "the sources of torch and sympy"),
}


@cache
def _corpus(name: str, vocab: int) -> tuple[Corpus, Tensor]:
    """A corpus, and tokens of another text: the docstrings of torch's layers, optimizers and distributions."""
    corpus = TEXTS[name](vocab)
    sources = [pair for part in ("nn", "optim", "distributions") for pair in _package("torch", text.docstrings, part)]
    other = "".join(document.text for document in text.documents(sources))
    return corpus, torch.tensor(corpus.tokenizer.encode(other).ids)


# -- a run -------------------------------------------------------------------------------------------------------------
_WIDENED = ("mm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


@contextmanager
def _quick_bf16() -> Iterator[str]:
    """A context in which a processor without bf16 instructions multiplies bf16 in fp32 and rounds each result once.

    bf16 instructions compute the same, except for the order of sums and for attention weights, which stay in fp32 until
    the second matmul. torch's bf16 matmuls take six times as long there. Yields a description.
    """
    if multiplies("bf16"):
        yield "instructions"
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels are replaced
        for name in _WIDENED:
            library.impl(name, _widened(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
    try:
        yield "fp32 products of the same numbers"
    finally:
        library._destroy()


def _widened(kernel: Any) -> Callable[..., Any]:
    def call(keys: Any, *args: Any, **options: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return kernel.call_boxed(keys, *args, **options)
        result = kernel.call_boxed(keys, *(a.float() if isinstance(a, Tensor) else a for a in args), **options)
        return result.bfloat16() if isinstance(result, Tensor) else (result[0].bfloat16(), *result[1:])

    return call


def _add_noise(share: float, gradient: Tensor) -> Tensor:
    return gradient + torch.randn_like(gradient) * (share * gradient.square().mean().sqrt())


def _trainer(cell: Cell, corpus: Corpus, directory: Path) -> Trainer:
    study, variation = cell.study, cell.variation
    name = variation.recipe if isinstance(variation.recipe, str) else variation.recipe.name
    if isinstance(variation.recipe, Recipe) and name not in recipes.RECIPES:
        recipes.register_recipe(variation.recipe)
    config = TrainConfig(
        precision=name, steps=study.steps, batch=study.batch, context=study.model.context,
        lr=study.rate * variation.rate, warmup=study.steps // 10, seed=cell.seed,
        eval_every=max(1, study.steps // 6), **dict(variation.settings),
    )  # fmt: skip
    model = GPT(study.model, seed=cell.seed)
    trainer = Trainer(model.bfloat16() if variation.short else model, corpus, config, directory)
    for group in trainer.optimizer.param_groups:
        group.update(variation.states)
    if variation.noise:
        for param in model.blocks.parameters():
            if param.ndim > 1:
                param.register_hook(partial(_add_noise, variation.noise))
    return trainer


def train(cell: Cell, scratch: Path) -> dict[str, Any]:
    """Train a cell, or resume it, and return its record.

    Raises:
        Interrupted: After SIGINT or SIGTERM; the state is saved.
    """
    corpus, other = _corpus(cell.study.text, cell.study.model.vocab)
    directory = scratch / cell.digest
    directory.mkdir(parents=True, exist_ok=True)
    machine = provenance()
    with _quick_bf16() as products, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="train.mixed_: this processor has no instructions")
        trainer = _trainer(cell, corpus, directory)
        with suppress(FileNotFoundError, ValueError):  # a state of another version of the loop: start again
            trainer.load()
        try:
            trainer.run()
            result = _losses(trainer, corpus, other)
        except FloatingPointError as error:
            result = {"failed": str(error)}
    line = {
        "study": cell.study.name,
        "variation": cell.variation.name,
        "seed": cell.seed,
        "digest": cell.digest,
        **result,
        "train": _curve(trainer.history.train),
        "curve": trainer.history.held_out,
        "tokens": trainer.step * cell.study.batch * cell.study.model.context,
        "seconds": round(trainer.history.seconds),
        "corpus": f"{corpus.fingerprint:08x}",
        "bf16": products,
        **{name: machine[name] for name in ("machine", "versions", "commit")},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "about": cell.about(),
    }
    return line


def _losses(trainer: Trainer, corpus: Corpus, other: Tensor) -> dict[str, Any]:
    """Final mean losses: on all held-out text, on other text, and of the last batches."""
    context = trainer.config.context
    held_out = corpus.held_out_windows(WINDOWS, context)
    count = min(WINDOWS, (len(other) - 1) // context)
    different = torch.stack([other[k * context : (k + 1) * context + 1] for k in range(count)])
    return {
        "held_out": evaluate(trainer.model, held_out, trainer.config.batch),
        "held_out_tokens": len(held_out) * context,
        "other": evaluate(trainer.model, different, trainer.config.batch),
        "other_tokens": len(different) * context,
        "last_batches": statistics.fmean(trainer.history.train[-LAST:]),
    }


def _curve(losses: list[float]) -> list[tuple[int, float]]:
    """Points (steps done, mean loss since the previous point)."""
    every = max(1, -(-len(losses) // POINTS))
    parts = [losses[start : start + every] for start in range(0, len(losses), every)]
    return [(min((k + 1) * every, len(losses)), round(statistics.fmean(part), 5)) for k, part in enumerate(parts)]


# -- the record --------------------------------------------------------------------------------------------------------
def record(directory: Path) -> dict[str, dict[str, Any]]:
    """All records by digest."""
    lines: dict[str, dict[str, Any]] = {}
    for path in sorted((directory / "evidence").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # an incomplete line
                row = json.loads(line)
                lines[row["digest"]] = row
    return lines


def _append(path: Path, line: dict[str, Any]) -> None:
    """Append a line, also after an incomplete line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or not path.read_bytes() or path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """Lock ``scratch``. Raises RuntimeError if another process trains there."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another process trains in {scratch}; let it end, or stop it by SIGTERM") from None
        yield


def run(directory: Path, only: str = "") -> Path:
    """Train cells that are not recorded and whose name matches ``only``; write ``evidence.md`` after each.

    SIGINT and SIGTERM stop it after a complete step, with the state saved.
    """
    wanted = [cell for cell in cells() if re.search(only, cell.name)]
    with _alone(SCRATCH):
        for cell in wanted:
            if cell.digest in record(directory):
                continue
            try:
                line = train(cell, SCRATCH)
            except Interrupted as stopped:
                print(f"{cell.name}: {stopped}", flush=True)
                break
            _append(directory / "evidence" / f"{cell.study.name}.jsonl", line)
            shutil.rmtree(SCRATCH / cell.digest)
            print(f"{line['date']} {cell.name}: {line.get('held_out', 'failed')}, {line['seconds']} s", flush=True)
            evidence_page.write(directory, record(directory))
    return evidence_page.write(directory, record(directory))


def main() -> None:
    parser = argparse.ArgumentParser(description="Training losses over paired seeds.")
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name matches")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.command == "report":
        print(evidence_page.write(chosen.out, record(chosen.out)))
        return
    print(run(chosen.out, chosen.only))


if __name__ == "__main__":
    main()
