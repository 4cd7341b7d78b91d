"""Benchmarks low-precision training against fp32 and bf16 autocast: saved activations, peak and time of a step.

``lowbit bench training`` writes training.md and training.png. All cases except fp32 use bf16 autocast. The optimizer is
torch's fused AdamW with fp32 weights. OMP_NUM_THREADS sets the number of threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.timing import Budget, Case, Group, measure
from lowbit.bench.training_peers import PEERS, Prepare
from lowbit.demo.gpt import GPT, Block, GPTConfig, rope
from lowbit.demo.step import loss_of
from lowbit.machine import multiplies, provenance
from lowbit.tables import markdown


@dataclass(frozen=True)
class Contender:
    """A training configuration. ``prepare`` changes a model in place; ``autocast``: to bf16."""

    name: str
    prepare: Prepare = lambda model: None
    autocast: bool = True


FP32, BF16 = Contender("fp32", autocast=False), Contender("bf16")
RECIPES = tuple(
    Contender(name, partial(lb.train.prepare_, recipe=name)) for name, recipe in lb.RECIPES.items() if recipe.trains
)
CONTENDERS = (FP32, BF16, *RECIPES)

#: Goals: a pattern of recipe names, and the largest ratio to bf16's figure.
Goals = Sequence[tuple[str, float]]
_FP8 = "(mx)?fp8.*"


def _shown(value: float, base: float, name: str, goals: Goals = ()) -> str:
    """The ratio of ``value`` to ``base``, in bold if it exceeds the goal of ``name``."""
    part = value / base
    goal = next((goal for pattern, goal in goals if name in lb.RECIPES and re.fullmatch(pattern, name)), None)
    return f"**{part:.2f}**" if goal is not None and round(part, 2) > goal else f"{part:.2f}"


# -- saved for backward ------------------------------------------------------------------------------------------------
TOKENS, WIDTH, HEADS, HIDDEN = (8, 256), 512, 8, 1536
#: A module, and its call with an input [*TOKENS, WIDTH] that needs a gradient.
Part = tuple[nn.Module, Callable[[Tensor], object]]


def _layer() -> Part:
    layer = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False))
    return layer, layer


def _gpt_block() -> Part:
    block = Block(GPTConfig(dim=WIDTH, heads=HEADS, hidden=HIDDEN), 0)
    turns = rope(torch.arange(TOKENS[1]), WIDTH // HEADS, 10000.0)
    return block, lambda x: block(x, *turns)


def _llama_block() -> Part:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=HIDDEN,
        attn_implementation="sdpa",
    )  # fmt: skip
    block: nn.Module = LlamaDecoderLayer(config, 0)
    turns = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(TOKENS[1])[None])
    return block, lambda x: block(x, position_embeddings=turns)


def _vit_block() -> Part:
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTLayer

    config = ViTConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH, attn_implementation="sdpa"
    )
    block: nn.Module = ViTLayer(config)
    return block, block


@dataclass(frozen=True)
class Kind:
    """A kind of layer or block, and the goals without and with compressed activations."""

    name: str
    make: Callable[[], Part]
    goals: Goals = ()
    compressed_goals: Goals | None = None  # None: nothing can be compressed

    def there(self) -> bool:
        try:
            self.make()
        except ImportError:
            return False
        return True


_BLOCK: Goals = ((_FP8, 0.65),)
KINDS = (
    Kind(f"Linear {WIDTH} to {HIDDEN}", _layer, ((_FP8, 0.52),)),
    Kind("block of the demo's GPT", _gpt_block, (), _BLOCK),
    Kind("Llama block of transformers", _llama_block, (), _BLOCK),
    Kind("ViT block of transformers", _vit_block, (), _BLOCK),
)


def kept(kind: Kind, contender: Contender, compressed: bool) -> int:
    """Bytes that one forward saves for backward."""
    model, call = kind.make()
    contender.prepare(model)
    if compressed:
        lb.train.compress_activations_(model)
    x = torch.randn(*TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=contender.autocast):
        return lb.memory.saved_bytes(lambda: call(x), model)


#: Bytes by contender, by kind and whether activations are compressed.
Kept = Mapping[tuple[Kind, bool], Mapping[str, int]]


def all_kept() -> Kept:
    ways = [(kind, c) for kind in KINDS if kind.there() for c in (False, True) if not c or kind.compressed_goals]
    return {(kind, c): {one.name: kept(kind, one, c) for one in CONTENDERS} for kind, c in ways}


def kept_table(found: Kept) -> str:
    head = ["", *(f"{kind.name}{', compressed' if compressed else ''}" for kind, compressed in found)]
    rows = []
    for one in CONTENDERS:
        cells = []
        for (kind, compressed), sizes in found.items():
            base, goals = found[kind, False][BF16.name], (kind.compressed_goals if compressed else kind.goals)
            cells.append(f"{sizes[one.name] / 2**20:.1f} ({_shown(sizes[one.name], base, one.name, goals or ())})")
        rows.append((one.name, *cells))
    return markdown(head, rows, numbers=range(1, len(head)))


def plot(found: Kept, path: Path) -> bool:
    """Plot bytes relative to bf16: a panel per kind, two bars per contender. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(kind for kind, _ in found))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.2 * len(kinds) + 1, 4.6), sharey=True, squeeze=False)
    places = {one.name: -place for place, one in enumerate(CONTENDERS)}
    for axis, kind in zip(axes[0], kinds, strict=True):
        base = found[kind, False][BF16.name]
        for compressed, colour, label in ((False, "#1b6ca8", "as it is"), (True, "#d95f02", "compressed")):
            sizes = found.get((kind, compressed), {})
            heights = [places[name] + (-0.2 if compressed else 0.2) for name in sizes]
            axis.barh(heights, [100 * size / base for size in sizes.values()], 0.38, color=colour, label=label)
        axis.axvline(100, color="black", linewidth=1)
        axis.set_title(kind.name, fontsize=9)
        axis.xaxis.set_major_formatter("{x:g}%")
        axis.grid(axis="x", alpha=0.4)
    axes[0][0].set_yticks(list(places.values()), list(places), fontsize=8)
    axes[0][-1].legend(fontsize=8)
    figure.suptitle("Bytes kept for backward, in percent of bf16 autocast's (compressed: norms, activations, products)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


# -- a step ------------------------------------------------------------------------------------------------------------
class Step:
    """A GPT that trains as ``contender`` says. A call is one step: forward, backward, AdamW, zero_grad."""

    def __init__(self, contender: Contender, config: GPTConfig, batch: int) -> None:
        self.model, self.autocast = GPT(config), contender.autocast
        contender.prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        tokens = torch.randint(config.vocab, (batch, config.context + 1), generator=torch.Generator().manual_seed(0))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]

    def __call__(self) -> None:
        self._step(self.inputs, self.targets)

    def begin(self) -> None:
        """One step with a few tokens, which allocates the optimizer's states."""
        self._step(self.inputs[:1, :32], self.targets[:1, :32])

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = loss_of(self.model, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


def _described(config: GPTConfig, batch: int) -> str:
    count = sum(p.numel() for p in GPT(config).parameters())
    return (
        f"{count / 1e6:.1f} million parameters ({config.layers} layers, width {config.dim}, {config.heads} heads, "
        f"hidden {config.hidden}, vocabulary {config.vocab}), {batch} x {config.context} tokens"
    )


@dataclass(frozen=True)
class Saving:
    """Memory techniques of a step, and the goals relative to bf16 with the same checkpointing."""

    name: str
    compressed: bool
    checkpointed: bool
    goals: Goals


SAVINGS = (
    Saving("as it is", False, False, ((_FP8, 0.90),)),
    Saving("compressed", True, False, ((_FP8, 0.75),)),
    Saving("checkpointed", False, True, ((_FP8, 0.95),)),
    Saving("both", True, True, ((_FP8, 0.95),)),
)
PEAK_SIZES = (
    GPTConfig(vocab=1024, layers=4, heads=8, dim=512, hidden=1024),
    GPTConfig(vocab=1024, layers=6, heads=6, dim=384, hidden=1024),
)
BATCH = 8


def peak(contender: Contender, saving: Saving, config: GPTConfig) -> int:
    """Peak bytes of a step after the optimizer's states are allocated."""
    step = Step(contender, config, BATCH)
    if saving.compressed:
        lb.train.compress_activations_(step.model)
    if saving.checkpointed:
        lb.memory.checkpoint_(step.model)
    step.begin()
    return lb.memory.allocated_peak(step)


def peak_table(config: GPTConfig) -> str:
    head = ("", *(saving.name for saving in SAVINGS))
    peaks = {(one.name, saving.name): peak(one, saving, config) for one in CONTENDERS for saving in SAVINGS}
    base = {saving.checkpointed: peaks[BF16.name, saving.name] for saving in SAVINGS if not saving.compressed}
    rows = []
    for one in CONTENDERS:
        sizes = [(peaks[one.name, saving.name], saving) for saving in SAVINGS]
        parts = (
            f"{size / 2**20:.0f} ({_shown(size, base[saving.checkpointed], one.name, saving.goals)})"
            for size, saving in sizes
        )
        rows.append((one.name, *parts))
    return markdown(head, rows, numbers=range(1, len(head)))


# -- its time ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Timed:
    """A GPT whose step is timed, in about ``seconds`` in total, with goals relative to bf16."""

    title: str
    config: GPTConfig
    batch: int
    seconds: float
    goals: Goals
    words: str  # the goals in words


TIMED = (
    Timed(
        "A larger GPT",
        GPTConfig(vocab=8192, layers=6, heads=8, dim=512, hidden=1536),
        BATCH,
        200,
        ((_FP8, 1.05), ("int8", 0.80), ("nvfp4", 1.40)),
        "FP8 and mxfp8 1.05, int8 0.80, nvfp4 1.40",
    ),
    Timed("The demo's GPT", GPTConfig(), 4, 40, ((".*", 1.30),), "1.30"),
)
#: The most turns per contender; slow ones have fewer.
TURNS = 7


def _median_seconds(cases: Iterator[Case], seconds: float) -> dict[str, float]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return measure(Group("training", "step", "GPT", 0, 0, tuple(cases), ()), Budget(TURNS, 0.0, seconds, clock))


def time_table(timed: Timed) -> str:
    """One row per contender and peer. Peers that cannot train here show the reason."""
    steps = {one.name: Step(one, timed.config, timed.batch) for one in CONTENDERS}
    reasons = {}
    for name, prepare in PEERS.items():
        try:
            step = Step(Contender(name, prepare), timed.config, timed.batch)
            step.begin()
            steps[name] = step
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    seconds = _median_seconds((Case(name, step) for name, step in steps.items()), timed.seconds)
    base = seconds[BF16.name]
    rows = [(name, f"{1e3 * t:.0f}", _shown(t, base, name, timed.goals), "") for name, t in seconds.items()]
    rows += [(name, "-", "-", reason) for name, reason in reasons.items()]
    return markdown(("", "a step, ms", "of bf16's", "why not"), rows, numbers=(1, 2))


WATCHED = ("fp8", "mxfp8", "nvfp4")
#: Steps between watched steps; 0: not watched.
EVERY = {"unwatched": 0, "watched, step not due": 10**9, "watched, step due": 1}


def watch_table() -> str:
    """The time of watching in the demo's GPT, one row per recipe."""
    timed = TIMED[-1]
    chosen = [one for one in RECIPES if one.name in WATCHED]
    with ExitStack() as watching:
        cases = []
        for one in chosen:
            for how, every in EVERY.items():
                step = Step(one, timed.config, timed.batch)
                step.begin()  # step 0 is always due
                if every:
                    watching.enter_context(lb.train.watch(step.model, every))
                cases.append(Case(f"{one.name} {how}", step))
        seconds = _median_seconds(iter(cases), timed.seconds)
    rows = []
    for one in chosen:
        times = [seconds[f"{one.name} {how}"] for how in EVERY]
        rows.append((one.name, *(f"{1e3 * t:.0f} ({t / times[0]:.2f})" for t in times)))
    return markdown(("", *EVERY), rows, numbers=range(1, len(EVERY) + 1))


# -- the file ----------------------------------------------------------------------------------------------------------
def _kept_section(picture: Path) -> Iterator[str]:
    found = all_kept()
    yield (
        f"\n## What forward keeps for backward, MiB\n\n{TOKENS[0]} x {TOKENS[1]} tokens of width {WIDTH}, in fp32 as "
        "they come from a residual. Storages that forward keeps, each once, with the copies of weights in few bits but "
        "without the weights. Goals for FP8 recipes: 0.52 of a layer, 0.65 of a block with compressed activations.\n"
    )
    if plot(found, picture):
        yield f"![bytes kept for backward, by kind of layer and recipe]({picture.name})\n"
    yield kept_table(found)


def _peak_section() -> Iterator[str]:
    yield (
        "\n## Peak of a step, MiB\n\nWhat a whole step allocates at its peak beyond weights and the states of the "
        "optimizer, by torch's allocator; beside bf16 with the same checkpointing. Goals for FP8 recipes: 0.90, 0.75 "
        "compressed, 0.95 checkpointed."
    )
    for config in PEAK_SIZES:
        yield f"\n{_described(config, BATCH)}:\n"
        yield peak_table(config)


def _time_section() -> Iterator[str]:
    yield (
        f"\n## Time of a step\n\nSteps take turns, at most {TURNS}; medians. With one thread it is the processor's "
        "time, which other programs disturb less. torchao trains without torch.compile, which its makers recommend. "
        "Its float8 multiplies codes by torch._scaled_mm, or with `emulate=True` numbers in bf16 that were rounded to "
        "FP8."
    )
    for timed in TIMED:
        yield f"\n### {timed.title}\n\n{_described(timed.config, timed.batch)}. Goals: {timed.words}.\n"
        yield time_table(timed)
    yield "\n### Watching\n\nThe demo's GPT within `train.watch`, ms; in parentheses the part of the unwatched step.\n"
    yield watch_table()


def _text(directory: Path) -> Iterator[str]:
    yield "# Training in low precision\n"
    for name, value in provenance(packages=("torchao", "transformers")).items():
        yield f"- {name}: {value}"
    yield f"- the processor multiplies bf16: {'yes' if multiplies('bf16') else 'no'}"
    yield (
        "\nAll but fp32 is under bf16 autocast, recipes too; nothing is compiled. In parentheses: the part of bf16's "
        "figure. In bold: above the goal, where there is one. `compressed` is with `train.compress_activations_`, "
        "`checkpointed` with `memory.checkpoint_`."
    )
    yield from _kept_section(directory / "training.png")
    yield from _peak_section()
    yield from _time_section()


def run(directory: Path) -> Path:
    """Measure, and write ``training.md`` and ``training.png``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "training.md"
    path.write_text("\n".join(_text(directory)) + "\n")
    return path
