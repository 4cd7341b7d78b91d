"""Benchmarks low-bit optimizers against torch, torchao and bitsandbytes: bytes, step time, and final loss.

``lowbit bench optimizers`` writes optimizers.md. Training runs are recorded in optimizers.jsonl next to it and not
repeated. The suite takes minutes if they are recorded, else hours. ``python -m lowbit.bench.optimizers --only REGEX``
only trains runs; a run that SIGTERM stops resumes in the next call.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import lowbit as lb
from lowbit.bench import probe, runs
from lowbit.bench.recorded import losses_table
from lowbit.bench.timing import Budget, Case, Group, measure, usable
from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import TrainConfig, Trainer
from lowbit.demo.optimizers import state_bytes
from lowbit.demo.step import optimizer_of
from lowbit.machine import provenance
from lowbit.optim.states import find
from lowbit.tables import markdown

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


# -- bytes and time of a step ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Contender:
    """An optimizer for parameters of ``dtype``. ``release``: gradients are freed during backward."""

    name: str
    make: Make
    dtype: torch.dtype = torch.float32
    release: bool = False


def _torchao(name: str, **options: Any) -> Make:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, name)(params, **options)
        return made

    return make


def _bitsandbytes(name: str, **options: Any) -> Make:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        import bitsandbytes.optim

        made: torch.optim.Optimizer = getattr(bitsandbytes.optim, name)(params, **options)
        return made

    return make


_BF16 = torch.bfloat16

#: Contenders of the memory table. bf16 parameters have masters, because training would stall otherwise.
BYTES = (
    Contender("torch AdamW, fp32", torch.optim.AdamW),
    Contender("torch AdamW, bf16 without master", torch.optim.AdamW, _BF16),
    Contender("torchao AdamW8bit, fp32", _torchao("AdamW8bit")),
    Contender("torchao AdamW8bit, bf16, stochastic", _torchao("AdamW8bit", bf16_stochastic_round=True), _BF16),
    Contender("torchao AdamW4bit, fp32", _torchao("AdamW4bit")),
    Contender("bitsandbytes AdamW8bit, fp32", _bitsandbytes("AdamW8bit")),
    Contender("lowbit AdamW8bit, fp32", lb.optim.AdamW8bit),
    Contender("lowbit GaLore8bit, rank 128, int4 projection, fp32", lb.optim.GaLore8bit),
    Contender("lowbit Apollo8bit, rank 128, fp32", partial(lb.optim.Apollo8bit, rank=128)),
    Contender("lowbit Apollo8bit, rank 1 (APOLLO-mini), fp32", partial(lb.optim.Apollo8bit, rank=1)),
    Contender("lowbit AdamW8bit, bf16, fp32 master", partial(lb.optim.AdamW8bit, master="fp32"), _BF16),
    Contender("lowbit AdamW8bit, bf16, residual master", partial(lb.optim.AdamW8bit, master="residual"), _BF16),
    Contender(
        "lowbit GaLore8bit, rank 128, bf16, stochastic, in backward",
        partial(lb.optim.GaLore8bit, master="stochastic"),
        _BF16,
        True,
    ),
    Contender(
        "lowbit AdamW8bit, bf16, residual master, in backward",
        partial(lb.optim.AdamW8bit, master="residual"),
        _BF16,
        True,
    ),
    Contender("lowbit AdamW8bit, bf16, stochastic", partial(lb.optim.AdamW8bit, master="stochastic"), _BF16),
    Contender("lowbit AdamW4bit, bf16, stochastic", partial(lb.optim.AdamW4bit, master="stochastic"), _BF16),
    Contender("lowbit Lion8bit, bf16, stochastic", partial(lb.optim.Lion8bit, master="stochastic"), _BF16),
    Contender("lowbit Lion4bit, bf16, stochastic", partial(lb.optim.Lion4bit, master="stochastic"), _BF16),
)

#: Contenders of the time table, with one fp32 tensor of SIDE x SIDE.
STEPS = (
    Contender("torch AdamW, fused", partial(torch.optim.AdamW, fused=True)),
    Contender("torch AdamW, foreach", partial(torch.optim.AdamW, foreach=True)),
    Contender("torchao AdamW8bit", _torchao("AdamW8bit")),
    Contender("bitsandbytes AdamW8bit", _bitsandbytes("AdamW8bit")),
    Contender("lowbit AdamW8bit", lb.optim.AdamW8bit),
    Contender("lowbit AdamW8bit, nearest", partial(lb.optim.AdamW8bit, rounding="nearest")),
    Contender("lowbit AdamW, dynamic8", partial(lb.optim.AdamW, bits="dynamic8")),
    Contender("lowbit AdamW4bit", lb.optim.AdamW4bit),
    Contender("lowbit AdamW, 16 bits", partial(lb.optim.AdamW, bits=16)),
    Contender("lowbit AdamW, 32 bits", partial(lb.optim.AdamW, bits=32)),
    Contender("lowbit Lion8bit", lb.optim.Lion8bit),
    Contender("lowbit SGD8bit, momentum", partial(lb.optim.SGD8bit, momentum=0.9)),
    Contender("lowbit SGD", lb.optim.SGD),
    Contender("lowbit Adafactor", lb.optim.Adafactor),
    Contender("lowbit GaLore8bit, rank 128", lb.optim.GaLore8bit),
    Contender("lowbit Apollo8bit, rank 128", partial(lb.optim.Apollo8bit, rank=128)),
    Contender("lowbit Apollo8bit, rank 1", partial(lb.optim.Apollo8bit, rank=1)),
    Contender("torch Adafactor", torch.optim.Adafactor),
    Contender("lowbit AdamW8bit, bf16, residual master", partial(lb.optim.AdamW8bit, master="residual"), _BF16),
    Contender("lowbit AdamW8bit, bf16, stochastic", partial(lb.optim.AdamW8bit, master="stochastic"), _BF16),
)
SIDE, MANY, SMALL = 4096, 1000, 1000
#: The number of contenders that are also timed with many small tensors.
MANY_OF = 5


def _llama(layers: int, hidden: int, mlp: int, kv: int, vocab: int) -> list[tuple[int, ...]]:
    """Parameter shapes of a model with tied embeddings."""
    square, narrow, norm = (hidden, hidden), (kv, hidden), (hidden,)
    layer = [square, narrow, narrow, square, (mlp, hidden), (mlp, hidden), (hidden, mlp), norm, norm]
    return [(vocab, hidden), *(layer * layers), norm]


#: Parameter shapes of real models, which have many tensors of all sizes: a part of SmolLM2-135M.
MODELS = {"SmolLM2-135M with 6 of its 30 layers": _llama(6, 576, 1536, 192, 49152)}
#: Contenders that are timed on them; below, the numbers of threads.
ON_MODELS = tuple(c for c in STEPS if c.name in ("torch AdamW, fused", "lowbit AdamW8bit", "lowbit AdamW, 32 bits"))
THREADS = (1, 2)


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn(param.shape).to(dtype)
    return made


def _held(contender: Contender, side: int = 1024) -> dict[str, float] | None:
    """Bytes per parameter after a step: weights, gradients, states and masters."""
    params = _parameters([(side, side)], contender.dtype)
    try:
        optimizer = contender.make(params)
        optimizer.step()
    except (ImportError, RuntimeError, NotImplementedError):
        if contender.name.startswith("lowbit"):
            raise
        return None
    if contender.release:
        lb.optim.in_backward_(nn.ParameterList(params), cast(Any, optimizer))
        params[0].sum().backward()
    count = params[0].numel()
    master = optimizer.state[params[0]].get("master")
    masters = 0 if master is None else master.nbytes
    return {
        "weights": params[0].nbytes / count,
        "gradients": 0.0 if params[0].grad is None else params[0].grad.nbytes / count,
        "states": (_bytes(optimizer) - masters) / count,
        "masters": masters / count,
    }


def _bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the states, including those inside tensor subclasses."""
    if isinstance(optimizer, lb.optim.Optimizer):
        return state_bytes(optimizer)
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                inner = getattr(value, "__tensor_flatten__", None)
                names = inner()[0] if inner and type(value) is not nn.Parameter else []
                total += sum(getattr(value, name).nbytes for name in names) if names else value.nbytes
    return total


def bytes_table() -> str:
    head = ("optimizer", "weights", "gradients", "states", "masters", "in all")
    cells = []
    for contender in BYTES:
        held = _held(contender)
        if held is not None:
            numbers = [f"{value:.2f}" for value in (*held.values(), sum(held.values()))]
            cells.append((contender.name, *numbers))
    return markdown(head, cells, numbers=range(1, len(head)))


def _stepping(contender: Contender, shapes: Sequence[tuple[int, ...]]) -> Case:
    optimizer = contender.make(_parameters(shapes, contender.dtype))
    return Case(contender.name, lambda: optimizer.step())


def _moved(contender: Contender, count: int) -> int:
    """Bytes that a step moves: gradients once, all else twice."""
    held = _held(contender)
    assert held is not None
    return round(count * (2 * sum(held.values()) - held["gradients"]))


def steps_table(contenders: Sequence[Contender], shapes: Sequence[tuple[int, ...]], limits: bool) -> str:
    """Median step times. Steps take turns with torch's and with a copy of as many bytes."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    baseline = STEPS[0]
    head = (
        ("optimizer", "ms", "of torch's fused", "of copying its bytes") if limits else ("optimizer", "ms", "of torch's")
    )
    cells = []
    for contender in contenders:
        cases = list(usable(partial(_stepping, contender, shapes)))
        if not cases:
            continue
        limit = (probe.copy_of(_moved(contender, count)),) if limits else ()
        beside = () if contender is baseline else (_stepping(baseline, shapes),)
        taken = measure(Group("optimizers", "step", contender.name, 0, 0, (*cases, *beside), limit), Budget(seconds=6))
        mine, theirs = taken[contender.name], taken[baseline.name]
        row = [contender.name, f"{1e3 * mine:.2f}", f"{mine / theirs:.2f}"]
        cells.append((*row, f"{taken['copy'] / mine:.0%}") if limits else tuple(row))
    return markdown(head, cells, numbers=range(1, len(head)))


def models_table() -> str:
    """``steps_table`` on the parameters of real models, by threads."""
    parts = []
    before = torch.get_num_threads()
    try:
        for name, shapes in MODELS.items():
            for threads in THREADS:
                torch.set_num_threads(threads)
                count = sum(torch.Size(shape).numel() for shape in shapes)
                parts += [
                    f"\n{name}: {len(shapes)} tensors, {count / 1e6:.1f} million elements; threads: {threads}\n",
                    steps_table(ON_MODELS, shapes, False),
                ]
    finally:
        torch.set_num_threads(before)
    return "\n".join(parts)


# -- final losses -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """A training run of the demo's GPT. ``short``: in bf16 throughout, without autocast."""

    name: str
    optimizer: str
    settings: tuple[tuple[str, Any], ...] = ()
    short: bool = False


#: The rank of GaLore and APOLLO: a quarter of the demo's width, as in the papers.
RANK = GPTConfig().dim // 4

RUNS = (
    Run("torch AdamW, fp32 states", "adamw"),
    Run("AdamW, 8 bits", "adamw8bit"),
    Run("AdamW, dynamic8", "adamw8bit", (("bits", "dynamic8"),)),
    Run("AdamW, 4 bits", "adamw4bit"),
    Run("AdamW, 8 bits, bf16 weights, residual", "adamw8bit", (("master", "residual"),), True),
    Run("AdamW, 8 bits, bf16 weights, stochastic", "adamw8bit", (("master", "stochastic"),), True),
    Run("Lion, 32 bits", "lion32bit"),
    Run("Lion, 8 bits", "lion8bit"),
    Run("Lion, 4 bits", "lion4bit"),
    Run("Muon, 32 bits", "muon32bit"),
    Run(f"GaLore, rank {RANK}, fp32 projection, 32 bits", "galore32bit", (("rank", RANK), ("projection_bits", 32))),
    Run(f"GaLore, rank {RANK}, int4 projection, 8 bits", "galore8bit", (("rank", RANK),)),
    Run(f"APOLLO, rank {RANK}, 8 bits", "apollo8bit", (("rank", RANK),)),
    Run("APOLLO-mini, 8 bits", "apollomini8bit"),
)
SEEDS, LENGTH, BATCH = (0, 1, 2), 1000, 2


def _cell(run: Run, seed: int, table: Path) -> float:
    """The final held-out loss of a run, from the record if there is one."""

    def make(corpus: Corpus, scratch: Path) -> Trainer:
        model = GPT(GPTConfig(vocab=corpus.tokenizer.get_vocab_size()), seed=seed)
        config = TrainConfig(
            precision="fp32" if run.short else "bf16", optimizer=run.optimizer, steps=LENGTH, batch=BATCH, seed=seed,
            warmup=100, eval_every=200,
        )  # fmt: skip
        trainer = Trainer(model.to(_BF16) if run.short else model, corpus, config, scratch)
        _set(trainer.optimizer, run)
        return trainer

    record = runs.trained(table, runs.record_name(run.name, seed), _about(run, seed), GPTConfig().vocab, make)
    return float(record["held_out"][-1][1])


def _set(optimizer: torch.optim.Optimizer, run: Run) -> None:
    """Change the groups to the settings of the run. Groups that are not projected (``rank=None``) stay so."""
    for group in optimizer.param_groups:
        group.update({name: value for name, value in run.settings if name != "rank" or group[name] is not None})


def states_table() -> str:
    """Bytes of states per parameter of the demo's GPT, by run."""
    cells = []
    for run in RUNS:
        model = GPT(GPTConfig())
        optimizer = optimizer_of(model.to(_BF16) if run.short else model, TrainConfig(optimizer=run.optimizer))
        _set(optimizer, run)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        cells.append((run.name, f"{state_bytes(optimizer) / sum(p.numel() for p in model.parameters()):.2f}"))
    return markdown(("optimizer", "bytes per parameter, with masters"), cells, numbers=(1,))


def _about(run: Run, seed: int) -> dict[str, Any]:
    """All settings that determine the bits of a run, as JSON data. A record with other settings is replaced."""
    settings = dict(run.settings)
    bits = settings.get("bits", "".join(c for c in run.optimizer if c.isdigit()))
    states = asdict(find(int(bits) if bits.isdigit() else bits)) if bits else None
    return {**asdict(run), "settings": settings, "states": states, "seed": seed, "steps": LENGTH, "batch": BATCH}


def _rows(table: Path) -> Iterator[tuple[str, dict[int, float]]]:
    for run in RUNS:
        yield run.name, {seed: _cell(run, seed, table) for seed in SEEDS}


def run(directory: Path) -> Path:
    """Measure, and write ``optimizers.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = dict(_rows(directory / "optimizers.jsonl"))
    about = provenance(packages=("torchao", "bitsandbytes"))
    text = [
        "# Optimizers of few bits\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\n## Bytes a parameter\n",
        "After one step on a matrix of 1024 x 1024. In backward: gradients are freed as they come.\n",
        bytes_table(),
        "\n## A step\n",
        f"On one matrix of {SIDE} x {SIDE}, gradients in the parameter's dtype; each row is measured in turns with "
        "torch's fused AdamW on the same shapes in fp32, and with a copy of as many bytes as its step moves.\n",
        steps_table(STEPS, [(SIDE, SIDE)], True),
        f"\nOn {MANY:,} vectors of {SMALL:,} elements:\n",
        steps_table(STEPS[:MANY_OF], [(SMALL,)] * MANY, False),
        "\nOn the parameters of real models:",
        models_table(),
        "\n## Where training ends\n",
        f"The demo's GPT, {LENGTH:,} steps of {BATCH} x {GPTConfig().context} tokens, held-out loss in nats a token. "
        "Changes are from the first row over the seeds of both: mean ± standard error, and Student's 95% interval. "
        "bf16 weights: the whole model is bf16, without autocast; else weights are fp32 under bf16 autocast.\n",
        f"<!-- table: optimizer_runs -->\n{losses_table(rows, RUNS[0].name)}\n<!-- end -->",
        f"\nTheir states:\n\n{states_table()}",
    ]
    path = directory / "optimizers.md"
    path.write_text("\n".join(text) + "\n")
    return path


def train(directory: Path, only: str = "") -> None:
    """Train runs that are not recorded and whose name and seed match ``only``, seed by seed."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for run in RUNS:
            name = f"{run.name}, seed {seed}"
            if re.search(only, name):
                print(f"{name}: {_cell(run, seed, directory / 'optimizers.jsonl'):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out losses of optimizers over paired seeds.")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--only", default="", metavar="REGEX", help="runs whose name, with ', seed N', matches")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    train(chosen.out, chosen.only)


if __name__ == "__main__":
    main()
