"""Benchmarks tiled losses and attention against torch: the peak and the time of a step.

``lowbit bench memory-kit`` writes memory_kit.md.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowbit as lb
from lowbit.bench.timing import Budget, Case, Group, measure
from lowbit.machine import provenance
from lowbit.tables import markdown

_BUDGET = Budget(samples=3, seconds=20)


@dataclass(frozen=True)
class Sizes:
    """Loss: rows, features and classes. Attention: heads, head dim and lengths; torch's plain attention is measured up
    to the length ``plain``. Model: layers, vocabulary, and tokens per batch.

    Many tokens: their number, features of a feed-forward part, classes of log-probabilities, and lengths of packed rows
    with documents of about ``document`` tokens. What needs more than ``limit`` bytes by an estimate is left out.
    """

    rows: int = 2048
    features: int = 512
    classes: int = 131072
    heads: int = 1
    dim: int = 64
    lengths: tuple[int, ...] = (4096, 8192, 32768)
    plain: int = 8192
    window: int = 1024
    layers: int = 30
    width: int = 576
    vocabulary: int = 49152
    tokens: tuple[int, int] = (2, 1024)
    many: int = 32768
    inner: int = 1536
    many_classes: int = 16384
    packed: tuple[int, ...] = (16384, 32768)
    document: int = 1000
    limit: int = 8 << 30


# -- contenders --------------------------------------------------------------------------------------------------------
def _with_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def _torch_in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())


def losses() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Losses by name, including torch's chunked loss if this torch has it."""
    chunked = {"F.linear_cross_entropy in chunks": _torch_in_chunks} if hasattr(F, "linear_cross_entropy") else {}
    return {
        "F.cross_entropy of logits": _with_logits,
        **chunked,
        "linear_cross_entropy": lb.memory.linear_cross_entropy,
    }


def _all_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attentions(sizes: Sizes, length: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Attentions by name. lowbit passes this case to SDPA unless ``chunk`` selects tiles."""
    plain = {"SDPA, all scores": _all_scores} if length <= sizes.plain else {}
    tile = 1 << 22
    return {
        **plain,
        "attention": lambda q, k, v: lb.memory.attention(q, k, v, causal=True),
        "attention in tiles": lambda q, k, v: lb.memory.attention(q, k, v, causal=True, chunk=tile),
        f"attention in tiles, window {sizes.window}": lambda q, k, v: lb.memory.attention(
            q, k, v, causal=True, window=sizes.window
        ),
    }


# -- tables ------------------------------------------------------------------------------------------------------------
def _rows(steps: dict[str, Callable[[], object]]) -> list[tuple[str, str, str, str]]:
    """For each: the peak, the time, and the time relative to the first. Steps take turns."""
    cases = tuple(Case(name, step) for name, step in steps.items())
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = measure(Group("memory", "step", "", 0, 0, cases, ()), replace(_BUDGET, clock=clock))
    base = seconds[next(iter(steps))]
    peaks = {name: lb.memory.allocated_peak(step) / 2**20 for name, step in steps.items()}
    return [(name, f"{peaks[name]:.1f}", f"{seconds[name]:.3g}", f"{seconds[name] / base:.2f}") for name in steps]


def _step(compute: Callable[..., Tensor], leaves: tuple[Tensor, ...], *rest: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(compute(*leaves, *rest).sum(), leaves)


_HEAD = ("peak, MiB", "s", "of the first")


def loss_table(sizes: Sizes) -> str:
    hidden = torch.randn(sizes.rows, sizes.features, requires_grad=True)
    weight = (torch.randn(sizes.classes, sizes.features) * sizes.features**-0.5).requires_grad_()
    targets = torch.randint(sizes.classes, (sizes.rows,))
    steps = {name: _step(compute, (hidden, weight), targets) for name, compute in losses().items()}
    return markdown(("loss", *_HEAD), _rows(steps), numbers=range(1, 4))


def _pairs(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A DPO step: the first half of the rows are chosen completions, the second half rejected ones."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
        sums = log_probs(hidden, weight, targets).sum(1)
        return lb.train.dpo_loss(*sums.chunk(2), *reference.chunk(2))

    return loss


def _log_probs_of_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.linear(hidden, weight).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _log_probs_in_tiles(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return lb.memory.linear_log_probs(hidden, weight, targets, entropy=False).log_probs


def preference_table(sizes: Sizes) -> str:
    completions = 8
    hidden = torch.randn(completions, sizes.rows // completions, sizes.features, requires_grad=True)
    weight = (torch.randn(sizes.classes, sizes.features) * sizes.features**-0.5).requires_grad_()
    targets = torch.randint(sizes.classes, hidden.shape[:2])
    reference = _log_probs_in_tiles(hidden, weight, targets).sum(1).detach()
    steps = {
        "log_softmax of logits": _step(_pairs(_log_probs_of_logits), (hidden, weight), targets, reference),
        "linear_log_probs": _step(_pairs(_log_probs_in_tiles), (hidden, weight), targets, reference),
    }
    return markdown(("log-probabilities", *_HEAD), _rows(steps), numbers=range(1, 4))


def attention_table(sizes: Sizes) -> str:
    rows: list[tuple[str, ...]] = []
    for length in sizes.lengths:
        q, k, v = (torch.randn(1, sizes.heads, length, sizes.dim, requires_grad=True) for _ in range(3))
        steps = {name: _step(compute, (q, k, v)) for name, compute in attentions(sizes, length).items()}
        rows += [(str(length), *row) for row in _rows(steps)]
    return markdown(("length", "attention", *_HEAD), rows, numbers=(0, 2, 3, 4))


# -- a full model -----------------------------------------------------------------------------------------------------
def models(sizes: Sizes, precision: str | None) -> dict[str, nn.Module]:
    """Llamas with shared weights, by the change applied to each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, intermediate_size=8 * sizes.width // 3,
        num_hidden_layers=sizes.layers, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=sizes.many, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    changes: dict[str, tuple[Callable[[Any], object], ...]] = {
        "eager attention": (),
        "eager attention, fuse_loss_": (lb.memory.fuse_loss_,),
        "SDPA": (lambda model: model.set_attn_implementation("sdpa"),),
        "attention_": (lb.memory.attention_,),
        "attention_, fuse_loss_": (lb.memory.attention_, lb.memory.fuse_loss_),
    }
    found = {}
    for name, applied in changes.items():
        found[name] = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        for change in applied:
            change(found[name])
        if precision is not None:
            lb.train.mixed_(found[name], precision)
    return found


def _gradient_bytes(sizes: Sizes) -> int:
    return sum(p.nbytes for p in next(iter(models(sizes, None).values())).parameters())


def model_table(sizes: Sizes, precision: str | None) -> str:
    ids = torch.randint(sizes.vocabulary, sizes.tokens)

    def step(model: nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters()))

    steps = {name: step(model) for name, model in models(sizes, precision).items()}
    return markdown(("training", *_HEAD), _rows(steps), numbers=range(1, 4))


# -- many tokens -------------------------------------------------------------------------------------------------------
class _SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


def feed_forward_table(sizes: Sizes) -> str:
    plain = nn.ModuleDict({"mlp": _SwiGLU(sizes.width, sizes.inner)})
    tiled = copy.deepcopy(plain, {id(p): p for p in plain.parameters()})
    lb.memory.tile_(tiled, 2048, ["mlp"])
    x = torch.randn(1, sizes.many, sizes.width, requires_grad=True)
    leaves = (x, *plain.parameters())
    steps: dict[str, Callable[[], object]] = {
        "plain": lambda: torch.autograd.grad(plain["mlp"](x).sum(), leaves),
        "tile_, 2048 rows": lambda: torch.autograd.grad(tiled["mlp"](x).sum(), leaves),
    }
    return markdown(("feed-forward part", *_HEAD), _rows(steps), numbers=range(1, 4))


def log_probs_table(sizes: Sizes) -> str:
    hidden = torch.randn(sizes.many, sizes.width, requires_grad=True)
    weight = (torch.randn(sizes.many_classes, sizes.width) * sizes.width**-0.5).requires_grad_()
    targets = torch.randint(sizes.many_classes, (sizes.many,))
    steps = {
        "log_softmax of logits": _step(_log_probs_of_logits, (hidden, weight), targets),
        "linear_log_probs": _step(_log_probs_in_tiles, (hidden, weight), targets),
    }
    return markdown(("log-probabilities", *_HEAD), _rows(steps), numbers=range(1, 4))


def batches(sizes: Sizes, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same documents in one packed row of ``length`` tokens, and in padded rows of one document each."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        drawn = torch.randint(sizes.document * 3 // 4, sizes.document * 5 // 4, (1,), generator=generator)
        lengths.append(min(int(drawn), left))
    ids = torch.randint(sizes.vocabulary, (length,), generator=generator)
    places = torch.cat([torch.arange(size) for size in lengths])
    labels = torch.where(places == 0, -100, ids)
    packed = {"input_ids": ids[None], "labels": labels[None], "position_ids": places[None]}
    documents = zip(ids.split(lengths), labels.split(lengths), strict=True)
    columns = zip(*((part, targets, torch.ones_like(part)) for part, targets in documents), strict=True)
    ids, labels, mask = (
        nn.utils.rnn.pad_sequence(list(column), batch_first=True, padding_value=value)
        for column, value in zip(columns, (0, -100, 0), strict=True)
    )
    return packed, {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packing_steps(sizes: Sizes, length: int) -> dict[str, Callable[[], object]]:
    """Training steps of a two-layer Llama with a fused loss that take no more than ``sizes.limit`` bytes."""
    packed, padded = batches(sizes, length)
    made = models(replace(sizes, layers=2), None)
    contenders = {
        "packed, SDPA with a mask": ("SDPA", packed),
        "packed, attention_": ("attention_", packed),
        "padded, SDPA": ("SDPA", padded),
    }
    steps: dict[str, Callable[[], object]] = {}
    for name, (change, batch) in contenders.items():
        model: Any = copy.deepcopy(made[change], {id(p): p for p in made[change].parameters()})
        model.config.use_cache = False
        lb.memory.fuse_loss_(model)
        if lb.estimate(model, batch, optimizer=None).peak_bytes <= sizes.limit:
            steps[name] = _training_step(model, batch)
    return steps


def _training_step(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(model(**batch).loss, list(model.parameters()))


def packing_table(sizes: Sizes) -> str:
    rows = [(str(length), *row) for length in sizes.packed for row in _rows(packing_steps(sizes, length))]
    return markdown(("tokens", "training", *_HEAD), rows, numbers=(0, 2, 3, 4))


def run(directory: Path) -> Path:
    """Measure, and write ``memory_kit.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about, sizes = provenance(packages=("transformers",)), Sizes()
    torch.manual_seed(0)
    text = [
        "# Losses and attention without their largest tensor\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\nForward and gradients in fp32. The peak is what a step allocates beyond its inputs, gradients among it. "
        "Steps of a table's group take turns. Times are medians; of one thread, of processor time.\n",
        "## Cross-entropy of a linear layer\n",
        f"{sizes.rows} rows of {sizes.features} features, {sizes.classes} classes. The gradient of the weight alone is "
        f"{sizes.classes * sizes.features * 4 / 2**20:.0f} MiB, the logits are "
        f"{sizes.rows * sizes.classes * 4 / 2**20:.0f} MiB.\n",
        loss_table(sizes),
        "\n## DPO\n",
        f"The same sizes: 4 pairs of completions of {sizes.rows // 8} tokens. `lb.train.dpo_loss` of their "
        "log-probabilities.\n",
        preference_table(sizes),
        "\n## Causal attention\n",
        f"One sequence, heads of {sizes.dim}: {sizes.heads}. `attention` gives SDPA what it serves in linear memory. "
        "Times are beside the first one's of the same length.\n",
        attention_table(sizes),
        "\n## A language model\n",
        f"A Llama of SmolLM2-135M's shape with random weights, {sizes.tokens[0]} x {sizes.tokens[1]} tokens: "
        f"{sizes.layers} layers of {sizes.width}, a vocabulary of {sizes.vocabulary}. The gradients alone are "
        f"{_gradient_bytes(sizes) / 2**20:.0f} MiB.\n",
        "In fp32:\n",
        model_table(sizes, None),
        "\nIn bf16, by `mixed_`:\n",
        model_table(sizes, "bf16"),
        f"\n## {sizes.many:,} tokens\n",
        f"A SwiGLU feed-forward part, {sizes.width} x {sizes.inner} features:\n",
        feed_forward_table(sizes),
        f"\nLog-probabilities of {sizes.many:,} rows of {sizes.width} features, {sizes.many_classes:,} classes. The "
        f"logits are {sizes.many * sizes.many_classes * 4 / 2**20:.0f} MiB.\n",
        log_probs_table(sizes),
        f"\nDocuments of about {sizes.document:,} tokens, packed into one row, or padded rows of one document each. "
        f"Two layers of the Llama above with `fuse_loss_`. Times are beside the first one's of the same tokens. "
        f"Rows that need more than {sizes.limit / 2**30:g} GiB by `lb.estimate` are left out.\n",
        packing_table(sizes),
    ]
    path = directory / "memory_kit.md"
    path.write_text("\n".join(text) + "\n")
    return path
