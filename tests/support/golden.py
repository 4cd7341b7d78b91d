"""Losses of a short training by each recipe, and the file that they are recorded in.

``python tests/support/golden.py NAME...`` records those of recipes, or of all that train.

The least difference in a sum moves some number to the neighbouring code, the next layer sees another number, and after
a few steps as many codes differ as if everything had been rounded anew. So what can be compared is not the bits but
how far two runs of the same arithmetic are apart. That is measured where losses are recorded: weights that differ by
one rounding of fp32 (a relative 2**-24 rms) make ``SEEDS`` other runs, and the farthest of them is the noise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "golden_losses.txt"
STEPS, BATCH, SEEDS = 30, 4, 5
SHAPE = GPTConfig(vocab=256, context=32, layers=3, heads=2, dim=64, hidden=160)
#: Of the first loss, before any weight has changed: one code that moved makes about this much.
ONE_CODE = 1e-4


@dataclass(frozen=True)
class Golden:
    """Losses fp64 ``[STEPS]`` of a recipe, and how far others of the same arithmetic are from them: ``first`` of the
    first loss, ``spread`` the root of the mean square of all."""

    losses: Tensor
    first: float
    spread: float

    @property
    def limits(self) -> tuple[float, float]:
        """How far other losses may be: 3 times the noise of the first loss, and 2 times that of all, which varies less
        since it is a sum of ``STEPS`` squares."""
        return 3 * max(self.first, ONE_CODE), 2 * self.spread

    def is_met_by(self, losses: Tensor) -> bool:
        return all(apart <= limit for apart, limit in zip(distance(losses, self.losses), self.limits, strict=True))


def distance(losses: Tensor, golden: Tensor) -> tuple[float, float]:
    apart = losses - golden
    return apart[0].abs().item(), apart.square().mean().sqrt().item()


def train(recipe: str | lb.Recipe, seed: int | None = None) -> Tensor:
    """Losses fp64 ``[STEPS]`` of a GPT on the bytes of the frozen text, with one thread, by plain SGD: the steps of an
    adaptive optimizer turn with the sign of gradients that are nearly zero. ``seed``: of other weights by a rounding.
    """
    text = torch.frombuffer(bytearray((DATA / "english.txt").read_bytes()), dtype=torch.uint8).long()
    model, seen, threads = GPT(SHAPE, seed=0), [], torch.get_num_threads()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 2.0**-24 * torch.randn(param.shape, generator=generator))
    lb.train.prepare_(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    torch.set_num_threads(1)
    try:
        for step in range(STEPS):
            rows = text[512 * step :][: BATCH * (SHAPE.context + 1)].reshape(BATCH, -1)
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    finally:
        torch.set_num_threads(threads)
    return torch.tensor(seen, dtype=torch.float64)


def record(recipe: str | lb.Recipe) -> Golden:
    losses = train(recipe)
    others = [distance(train(recipe, seed), losses) for seed in range(SEEDS)]
    return Golden(losses, max(first for first, _ in others), max(spread for _, spread in others))


def read() -> dict[str, Golden]:
    """By recipe, what is recorded."""
    rows = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")] if FILE.exists() else []
    numbers = {name: [float(text) for text in texts] for name, *texts in rows}
    return {
        name: Golden(torch.tensor(losses, dtype=torch.float64), first, spread)
        for name, (first, spread, *losses) in numbers.items()
    }


def write(rows: dict[str, Golden]) -> None:
    lines = ["# recipe, noise of the first loss, noise of all losses, losses (tests/support/golden.py)"]
    for name, row in rows.items():
        losses = " ".join(f"{loss:.7f}" for loss in row.losses.tolist())
        lines.append(f"{name} {row.first:.2e} {row.spread:.2e} {losses}")
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    able = [name for name, row in lb.RECIPES.items() if row.trains]
    made = read() | {name: record(name) for name in sys.argv[1:] or able}
    write({name: made[name] for name in able if name in made})
