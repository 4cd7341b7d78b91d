"""Models whose blocks look like a chain and are none: their codes are those of the model seen as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import run_processes
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import blockwise
from lowbit.models.blocks import Chain


class Block(nn.Module):
    store: dict[str, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, extra: Any = None) -> Tensor:
        y = self.norm(x)
        holder = self.store if isinstance(extra, Tensor | None) else extra
        if holder is not None:
            kept = holder if isinstance(holder, dict) else vars(holder)
            y = y + kept.get("state", 0)
            kept["state"] = 3 * y
        if isinstance(extra, Tensor):
            y = y + extra
        return x + self.down(F.gelu(self.up(y)))


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gate, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.body(self, self.embed(x)))
        return answer


def _plain(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def _argument_of_the_hidden_state(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x, model.gate(x))
    return x


def _the_state_before(model: Model, x: Tensor) -> Tensor:
    before = x
    for block in model.blocks:
        before, x = x, block(x, before)
    return x


def _skips(model: Model, x: Tensor) -> Tensor:
    first, second, third, fourth = model.blocks
    x = first(x)
    y = second(x)
    return fourth(third(y, y), x)  # type: ignore[no-any-return]


def _all_states(model: Model, x: Tensor) -> Tensor:
    states = []
    for block in model.blocks:
        x = block(x)
        states.append(x)
    return torch.stack(states).mean(0)


def _dict_between(model: Model, x: Tensor) -> Tensor:
    shared: dict[str, Tensor] = {}
    for block in model.blocks:
        x = block(x, shared)
    return x


def _object_between(model: Model, x: Tensor) -> Tensor:
    shared = SimpleNamespace()
    for block in model.blocks:
        x = block(x, shared)
    return x


def _attribute_between(model: Model, x: Tensor) -> Tensor:
    shared: dict[str, Tensor] = {}
    for block in model.blocks:
        block.store = shared
        x = block(x)
    return x


def _data_between(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
        x.data.mul_(1.5)
    return x


def _codes(model: nn.Module, recipe: str, method: str | None) -> dict[str, list[Tensor]]:
    torch.manual_seed(1)
    found = lb.calibrate(model, recipe, [torch.randn(2, 6, 8) for _ in range(2)], method, skip=())
    scales = {f"{name} input": list(given[0]) for name, given in found.inputs.items()}
    codes = {name: [q.codes, q.scale] for name, q in found.weights.items()}
    return {name: [t for t in ts if isinstance(t, Tensor)] for name, ts in (codes | scales).items()}


def _equal(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        all(map(torch.equal, tensors, other[name])) for name, tensors in one.items()
    )


CASES = [("int4-weight-only:group16", None), ("int4-weight-only:group16", "gptq"), ("int8-static", None)]


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "body",
    [
        _argument_of_the_hidden_state, _the_state_before, _skips, _all_states, _dict_between, _object_between,
        _attribute_between, _data_between,
    ],
)  # fmt: skip
@pytest.mark.parametrize(("recipe", "method"), CASES)
def test_what_passes_beside_the_hidden_state_is_seen(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[Model, Tensor], Tensor], recipe: str, method: str | None
) -> None:
    model = Model(body)
    if recipe == "int8-static" and body is not _argument_of_the_hidden_state:
        del model.gate  # nothing calls it
    model(torch.randn(2, 6, 8))  # leaves tensors with a graph in attributes
    seen = _codes(model, recipe, method)
    monkeypatch.setattr(blockwise, "_blocks", lambda model: [])
    assert _equal(seen, _codes(model, recipe, method))


class Optional(Model):
    """A chain, but with ``gated``, where blocks are given the states before the last as well."""

    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        self.body = _the_state_before if gated else _plain
        return super().forward(x)


def test_each_kind_of_batch_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    batches = [{"x": torch.randn(2, 6, 8)}, {"x": torch.randn(2, 6, 8)}, {"x": torch.randn(2, 6, 8), "gated": True}]
    model, recipe = Optional(_plain), CASES[0][0]
    seen = lb.calibrate(model, recipe, batches, "gptq", skip=())
    monkeypatch.setattr(blockwise, "_blocks", lambda model: [])
    whole = lb.calibrate(model, recipe, batches, "gptq", skip=())
    assert all(torch.equal(q.codes, whole.weights[name].codes) for name, q in seen.weights.items())


def test_a_chain_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(_plain)
    seen = _codes(model, *CASES[1])
    monkeypatch.setattr(blockwise, "_blocks", lambda model: [])
    assert not _equal(seen, _codes(model, *CASES[1]))


def _process(rank: int, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29523")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        model = Model((_plain, _skips)[rank])
        lb.calibrate(model, CASES[1][0], [torch.randn(2, 6, 8)], CASES[1][1], skip=()).save(f"{path}/{rank}")
    finally:
        dist.destroy_process_group()


def test_processes_agree_on_what_is_a_chain(tmp_path: Path) -> None:
    run_processes(_process, (str(tmp_path),))  # to the first alone it is one
    first, second = (lb.Calibration.load(tmp_path / str(rank)) for rank in range(2))
    assert all(torch.equal(q.codes, second.weights[name].codes) for name, q in first.weights.items())


class Stage(nn.Module):
    """The first stage keeps its channels, as those of ConvNeXt do."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(channels), nn.Linear(channels, out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.norm(x))
        return y


def test_stages_of_growing_width_are_taken_whole() -> None:
    torch.manual_seed(0)
    stages = nn.Sequential(Stage(8, 8), Stage(8, 16))
    model = nn.Sequential(stages, nn.LayerNorm(16), nn.Linear(16, 4))
    assert not Chain(list(stages)).record(model, [torch.randn(2, 8)])
    found = lb.calibrate(model, "int8-static", [torch.randn(32, 8)], skip=())
    assert len(found.inputs) == 3


def test_an_encoder_and_a_decoder_of_transformers_keep_no_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = torch.randint(3, 96, (2, 9))
    batches = [{"input_ids": tokens, "decoder_input_ids": tokens[:, :5]}]
    before = model(**batches[0]).logits
    for recipe in ("int8-static", "int4-weight-only:group32"):
        found = lb.calibrate(model, recipe, batches)
        assert {row.method for row in found.rows.values()} <= {"signed", "nearest", "guided-gptq"}
    assert torch.equal(model(**batches[0]).logits, before)
    assert model.config.use_cache and model.decoder.config.use_cache
