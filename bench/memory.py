"""Compares memory estimates and profiles of training with the allocator's peak.

``lowbit bench memory`` writes memory.md, or memory_cuda.md with ``--device cuda``: five models in two sizes, each with
four training settings. The models have the shapes of real ones with fewer layers, and random weights. ``--device h200``
estimates the rows of memory_cuda.md without a GPU, for memory_absent.md.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.machine import provenance
from lowbit.optim.names import find_optimizer
from lowbit.tables import markdown


@dataclass(frozen=True)
class Setting:
    """A training setting: arguments of ``lb.estimate``."""

    recipe: str | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    checkpoint: str | None = None
    micro_batches: int = 1

    def __str__(self) -> str:
        parts = [self.recipe or "", self.precision or ("" if self.recipe else "fp32"), self.optimizer]
        parts += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(part for part in parts if part)


class Subject(NamedTuple):
    """A named model with a batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    settings: tuple[Setting, ...]


def _gpt(layers: int, dim: int) -> Callable[[], nn.Module]:
    return lambda: GPT(GPTConfig(vocab=1024, layers=layers, heads=dim // 64, dim=dim, hidden=2 * dim))


def _of_transformers(name: str, **shape: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model of this class and shape, with random weights."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        model: nn.Module = kind(kind.config_class(**shape))
        return model.train()

    return make


def _tokens(vocab: int, rows: int, length: int) -> Callable[[], Any]:
    return lambda: {"input_ids": torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))}


def _images(rows: int, side: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(0))}


def _gpt_tokens(rows: int, length: int) -> Callable[[], Any]:
    return lambda: torch.randint(1024, (rows, length), generator=torch.Generator().manual_seed(0))


#: Training settings for models of Linear layers, and of convolutions.
_LINEAR = (
    (Setting(), Setting("fp8", "bf16", "adamw8bit"), Setting(None, "bf16", "adamw8bit", "block"),
     Setting("int8", "bf16", "lion8bit", "attention")),
    (Setting(None, "bf16"), Setting("fp8-tensor", "bf16", "adamw4bit", "block"),
     Setting("mxfp8", "bf16", "adamw8bit", "save_matmuls"), Setting("nvfp4", "bf16", "sgd", "mlp", 2)),
)  # fmt: skip
_CONV = (
    (Setting(), Setting(None, "bf16", "sgd"), Setting(None, None, "adamw8bit", "stages"),
     Setting(None, None, "sgd", None, 2)),
    (Setting(), Setting(None, "bf16", "adamw8bit"), Setting(None, "bf16", "lion8bit", "stages"),
     Setting(None, None, "muon8bit")),
)  # fmt: skip

_LLAMA = {"vocab_size": 2048, "num_key_value_heads": 3, "tie_word_embeddings": True, "use_cache": False}
_BERT = {"vocab_size": 4096, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
_VIT = {"image_size": 64, "patch_size": 8, "num_labels": 100}
_RESNET = {"layer_type": "basic", "depths": [2, 2, 2, 2], "num_labels": 100}

SUBJECTS = (
    Subject("GPT, 3 layers of 256", _gpt(3, 256), _gpt_tokens(4, 256), _LINEAR[0]),
    Subject("GPT, 6 layers of 384", _gpt(6, 384), _gpt_tokens(2, 256), _LINEAR[1]),
    Subject("Llama, 3 layers of 384", _of_transformers("LlamaForCausalLM", hidden_size=384, intermediate_size=1024,
            num_hidden_layers=3, num_attention_heads=6, **_LLAMA), _tokens(2048, 4, 128), _LINEAR[0]),
    Subject("Llama, 4 layers of 576", _of_transformers("LlamaForCausalLM", hidden_size=576, intermediate_size=1536,
            num_hidden_layers=4, num_attention_heads=9, **_LLAMA), _tokens(2048, 2, 256), _LINEAR[1]),
    Subject("ViT, 4 layers of 192", _of_transformers("ViTForImageClassification", hidden_size=192, num_hidden_layers=4,
            num_attention_heads=3, intermediate_size=768, **_VIT), _images(16, 64), _LINEAR[0]),
    Subject("ViT, 4 layers of 384", _of_transformers("ViTForImageClassification", hidden_size=384, num_hidden_layers=4,
            num_attention_heads=6, intermediate_size=1536, **_VIT), _images(8, 64), _LINEAR[1]),
    Subject("ResNet-18, 64 x 64", _of_transformers("ResNetForImageClassification", hidden_sizes=[64, 128, 256, 512],
            embedding_size=64, **_RESNET), _images(16, 64), _CONV[0]),
    Subject("ResNet-18, half as wide, 96 x 96", _of_transformers("ResNetForImageClassification",
            hidden_sizes=[32, 64, 128, 256], embedding_size=32, **_RESNET), _images(16, 96), _CONV[1]),
    Subject("MiniLM, 3 layers of 384", _of_transformers("BertForSequenceClassification",
            num_hidden_layers=3, **_BERT), _tokens(4096, 8, 128), _LINEAR[0]),
    Subject("MiniLM, 6 layers of 384", _of_transformers("BertForSequenceClassification",
            num_hidden_layers=6, **_BERT), _tokens(4096, 4, 64), _LINEAR[1]),
)  # fmt: skip


#: The GPU of ``memory_cuda.md``.
RECORDED = "h200"


class Row(NamedTuple):
    """Peak bytes of a step: estimated, profiled, requested from the allocator, and allocated by it.

    On CUDA it allocates more than requested if it cannot split a block. ``seconds``: of the estimate.
    """

    subject: str
    setting: str
    estimated: int
    profiled: int
    asked: int
    held: int
    seconds: float


def storages(tree: Any) -> int:
    """Bytes of the distinct storages of the tensors in a tree."""
    tensors = (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def row(subject: Subject, setting: Setting, device: str) -> Row:
    """Estimate, then train three steps: for the states, for the allocator's peak, and for the profile."""
    model = subject.make().to(device)
    batch = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), subject.batch())
    begin = time.perf_counter()
    estimate = lb.estimate(
        model, batch, None, setting.recipe, setting.optimizer, setting.checkpoint, precision=setting.precision,
        micro_batches=setting.micro_batches,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if setting.recipe:
        lb.train.prepare_(model, setting.recipe)
    if setting.precision:
        lb.train.mixed_(model, setting.precision)
    if setting.checkpoint:
        lb.memory.checkpoint_(model, setting.checkpoint)
    optimizer = find_optimizer(setting.optimizer).make(model.parameters())

    def step(given: Any) -> None:
        for _ in range(setting.micro_batches):
            lb.memory.usual_loss(model(**given) if isinstance(given, dict) else model(given), given).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(batch)
    states = list(optimizer.state.values())
    before = storages([list(model.parameters()), list(model.buffers()), states, batch])
    asked_before = _asked("current") if device == "cuda" else 0
    held = lb.memory.allocated_peak(lambda: step(batch), device) + before
    asked = _asked("peak") - asked_before + before if device == "cuda" else held
    gc.collect()
    with lb.memory.profile(model) as profile:
        step(batch)
    profiled = profile.peak_bytes - profile.by_kind.get("other", 0)
    return Row(subject.name, str(setting), estimate.peak_bytes, profiled, asked, held, seconds)


def _asked(when: str) -> int:
    """Bytes requested from CUDA's allocator, ``current`` or ``peak``."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


def _errors(rows: list[Row], take: Callable[[Row], float]) -> str:
    errors = [abs(take(row)) for row in rows]
    return f"median {statistics.median(errors):.2%}, worst {max(errors):.2%}"


def _by_subject(device: str) -> Iterator[list[Row]]:
    """The rows of each subject. On CUDA each has a separate process, so the allocator is empty at first."""
    numbers, devices = range(len(SUBJECTS)), [device] * len(SUBJECTS)
    if device == "cpu":
        yield from map(_rows, numbers, devices)
        return
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        yield from pool.map(_rows, numbers, devices)


def _rows(number: int, device: str) -> list[Row]:
    subject = SUBJECTS[number]
    return [row(subject, setting, device) for setting in subject.settings]


def run(directory: Path, device: str = "cpu") -> Path:
    """Measure on ``device``, and write ``memory.md`` or ``memory_cuda.md``; ``memory_absent.md`` for ``RECORDED``."""
    if device == RECORDED:
        return _without(directory)
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance(packages=("transformers",))
    rows = [one for found in _by_subject(device) for one in found]
    cells = [
        (r.subject, r.setting, *(f"{size / 2**20:.1f}" for size in (r.estimated, r.asked, r.profiled, r.held)),
         f"{r.estimated / r.asked - 1:+.2%}", f"{r.profiled / r.held - 1:+.2%}", f"{r.seconds:.1f}")
        for r in rows
    ]  # fmt: skip
    head = ("model", "training", "estimated, MiB", "asked for", "profiled", "held", "estimate is off by",
            "profile is off by", "the estimate took, s")  # fmt: skip
    text = [
        "# Memory: estimated, profiled, held\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        *([f"- device: {torch.cuda.get_device_name()}"] if device == "cuda" else []),
        f"\n{len(rows)} configurations. The estimate is made before the first step, on fake tensors. Held is the peak "
        "of torch's allocator in the third step, above parameters, states and batch: what torch's profiler counts. "
        "Asked for is the same without what CUDA's allocator adds where it cannot split a block, up to 1 MiB a "
        "tensor.\n",
        f"- the estimate against what was asked for: {_errors(rows, lambda r: r.estimated / r.asked - 1)}",
        f"- what was held against what was asked for: {_errors(rows, lambda r: r.held / r.asked - 1)}",
        f"- the profile against what was held: {_errors(rows, lambda r: r.profiled / r.held - 1)}\n",
        markdown(head, cells, numbers=range(2, len(head))),
    ]
    path = directory / ("memory.md" if device == "cpu" else f"memory_{device}.md")
    path.write_text("\n".join(text) + "\n")
    return path


def _without(directory: Path) -> Path:
    """Estimate for the GPU of ``memory_cuda.md`` on this machine, and write ``memory_absent.md``."""
    about = provenance(packages=("transformers",))
    lines = (directory / "memory_cuda.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
    asked = {(cells[0], cells[1]): float(cells[3]) for cells in table[2:]}
    cells, errors = list[tuple[str, ...]](), list[float]()
    for subject in SUBJECTS:
        model, batch = subject.make(), subject.batch()
        for setting in subject.settings:
            estimate = lb.estimate(
                model, batch, None, setting.recipe, setting.optimizer, setting.checkpoint, precision=setting.precision,
                micro_batches=setting.micro_batches, device=RECORDED,
            )  # fmt: skip
            held = asked[subject.name, str(setting)]
            errors.append(estimate.peak_bytes / 2**20 / held - 1)
            cells.append((subject.name, str(setting), f"{estimate.peak_bytes / 2**20:.1f}", f"{held:.1f}",
                          f"{errors[-1]:+.2%}"))  # fmt: skip
    sizes = sorted(map(abs, errors))
    text = [
        f"# Memory on an {RECORDED.upper()}, estimated without one\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f'\n{len(cells)} configurations, estimated for `device={RECORDED!r}`. Measured is the column "asked for" of '
        "memory_cuda.md, which a GPU recorded at an older commit. Since then a step holds the logits once less, which "
        "are 4 MiB in rows of GPT and Llama.\n",
        f"- the estimate against the measurement: median {statistics.median(sizes):.2%}, worst {sizes[-1]:.2%}\n",
        markdown(("model", "training", "estimated, MiB", "measured, MiB", "off by"), cells, numbers=range(2, 5)),
    ]
    path = directory / "memory_absent.md"
    path.write_text("\n".join(text) + "\n")
    return path
