"""Compares Adam updates with 8-bit moments to updates with fp32 moments.

``python -m bench.moments`` prints the table of docs/measured.md. Deterministic: fixed seeds, no timing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import lowbit as lb
from lowbit.ops.optim import STATE_SCHEME
from lowbit.tables import markdown

COUNT, STEPS, BLOCK = 1 << 16, 300, 256
BETAS, EPS = (0.9, 0.999), 1e-8

#: Rounds a moment as a format stores it, given the moment and the step.
Keep = Callable[[Tensor, int], Tensor]


def _dynamic(signed: bool) -> Tensor:
    """The dynamic tree codebook of arXiv 2110.02861: seven decades, each with half as many steps as the one before."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + 1 - signed) + 1)
        for middle in ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist():
            values += [middle, -middle] if signed else [middle]
    return torch.tensor(sorted(set(values)))


def _by_codebook(book: Tensor, x: Tensor, step: int) -> Tensor:
    blocks = x.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    return (book[torch.bucketize(blocks / scale, (book[1:] + book[:-1]) / 2)] * scale).view(-1)


def _by_scheme(scheme: str, rounding: str, x: Tensor, step: int) -> Tensor:
    return lb.fake_quantize(x[None], scheme, rounding=rounding if rounding == "nearest" else lb.Rounding(5, step))[0]


def _root(keep: Keep, x: Tensor, step: int) -> Tensor:
    return keep(x.sqrt(), step).square()


_E4M3, _STOCHASTIC = (partial(_by_scheme, STATE_SCHEME, r) for r in ("nearest", "stochastic"))
_LINEAR = partial(_by_scheme, f"int8:group{BLOCK}", "nearest")

#: How the first and the second moment are stored.
WAYS: dict[str, tuple[Keep, Keep]] = {
    "E4M3, the second moment as its root (`adamw`)": (_E4M3, partial(_root, _E4M3)),
    "the same, stochastic": (_STOCHASTIC, partial(_root, _STOCHASTIC)),
    "E4M3, the second moment itself": (_E4M3, _E4M3),
    "dynamic codebook, both": (partial(_by_codebook, _dynamic(True)), partial(_by_codebook, _dynamic(False))),
    "int8, both": (_LINEAR, _LINEAR),
}


def distance(keep: tuple[Keep, Keep], spread: float, fade: float) -> float:
    """The relative distance of the sums of all updates.

    Gradient magnitudes differ by ``exp(spread * normal)`` within a block. Those of every seventh element are multiplied
    by ``fade`` after 50 steps.
    """
    generator = torch.Generator().manual_seed(3)
    mean, noise = (
        scale * torch.exp(spread * torch.randn(COUNT, generator=generator)) for scale in (1e-3, 1e-2)
    )  # fmt: skip
    ours, exact = ([torch.zeros(COUNT) for _ in range(3)] for _ in range(2))
    for step in range(1, STEPS + 1):
        grad = mean + noise * torch.randn(COUNT, generator=generator)
        grad[::7] *= fade if step > 50 else 1.0
        for state in (ours, exact):
            m, v, total = state
            m.lerp_(grad, 1 - BETAS[0])
            v.lerp_(grad * grad, 1 - BETAS[1])
            total += (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        ours[:2] = keep[0](ours[0], step), keep[1](ours[1], step)
    return float((ours[2] - exact[2]).norm() / exact[2].norm())


#: Spread of the gradients within a block, and the factor of fading ones.
CASES = {"alike": (0.5, 1.0), "unequal": (1.5, 1.0), "unequal, some fade to 1/20": (1.5, 0.05)}


def main() -> None:
    rows = ([way, *(f"{100 * distance(keep, *case):.3g}%" for case in CASES.values())] for way, keep in WAYS.items())
    print(markdown([f"moments in 8 bits, blocks of {BLOCK}", *CASES], rows, numbers=range(1, len(CASES) + 1)))


if __name__ == "__main__":
    main()
