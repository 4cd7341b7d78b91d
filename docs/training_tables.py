"""Tables about training and its memory, for ``generate_tables.py``."""

from __future__ import annotations

from collections.abc import Callable

from lowbit.checkpointing.policies import POLICIES
from lowbit.combinations import COMBINATIONS
from lowbit.memory.devices import DEVICES
from lowbit.ops.optim import FLOAT_STATES
from lowbit.optim import STATES, States
from lowbit.plan.techniques import FALLBACKS, LIVE, TECHNIQUES, Technique
from lowbit.scaling import scheme
from lowbit.tables import markdown


def states() -> str:
    """Return the state precisions of lb.optim, with AdamW's bytes per parameter."""

    def row(states: States) -> tuple[object, ...]:
        schemes = states.signed, states.root
        first = next(other for other in STATES.values() if other.bits == states.bits) is states
        size = sum(map(_state_bits, schemes)) / 8
        names = (f"`{name}`" for name in schemes)
        return f"`{states.name}`", states.bits if first else "", *names, states.rounding, f"{size:.2f}"

    head = ("name", "bits", "first moment", "root of the second moment", "rounding", "bytes per parameter")
    return markdown(head, map(row, STATES.values()), numbers=(5,))


def _state_bits(name: str) -> float:
    if name in FLOAT_STATES:
        return 8.0 * FLOAT_STATES[name].itemsize
    state = scheme(name)
    return state.format.bits + state.scale_bits / (state.block[1] or 1)


#: The effect of techniques on losses.
RESULTS = {"equal": "none (bit-identical)", "close": "order of sums", "own": "other arithmetic"}


def _change(technique: Technique) -> str:
    recorded = f"{technique.loss:+.2f}%" if technique.loss else ""
    return ", ".join(filter(None, (RESULTS[technique.results], recorded)))


def techniques() -> str:
    """Return the techniques that ``require`` and ``exclude`` of ``lb.fit`` name."""

    def row(dimension: str, technique: Technique) -> tuple[str, ...]:
        plain = technique is TECHNIQUES[dimension][0]
        live = "yes" if all(name in LIVE for name in technique.changes) else "no"
        return (
            dimension if plain else "", f"`{technique.name}`", technique.about,
            _change(technique) if technique.changes else "", live if technique.changes else "",
        )  # fmt: skip

    head = ("dimension", "name", "description", "recorded loss change", "`run.refit` may change it")
    return markdown(head, (row(name, technique) for name, options in TECHNIQUES.items() for technique in options))


def fallbacks() -> str:
    """Return the fallbacks of a run that is out of memory."""
    return markdown(
        ("setting, in this order", "description", "loss change"),
        (
            (
                f"`{technique.name}`" + (", doubled each time" if technique.more else ""), technique.about,
                RESULTS[technique.results],
            )
            for _, technique in FALLBACKS
        ),
    )  # fmt: skip


def policies() -> str:
    """Return the named policies of ``checkpoint_``."""
    return markdown(
        ("policy", "recomputes"),
        ((f'`"{name}{":N" if row.argument else ""}"`', row.about) for name, row in POLICIES.items()),
    )


def combinations() -> str:
    return markdown(
        ("technique", "cannot be combined with", "reason", "alternative", "raises an error"),
        (
            (pair.first, pair.second, pair.why, pair.instead, "yes" if pair.raises else "no")
            for pair in COMBINATIONS.values()
        ),
    )


def devices() -> str:
    """Return the devices that ``device=`` of ``lb.fit`` names."""
    kinds = ("fp32", "bf16", "fp8", "int8", "fp4")
    head = (
        "name", "memory, GiB", "bandwidth, GB/s", *(f"{kind}, TFLOPS" for kind in kinds), "host, GB/s", "link, GB/s",
    )  # fmt: skip
    rows = (
        (f"`{name}`", f"{row.memory / 2**30:.1f}", f"{row.bandwidth / 1e9:.0f}",
         *(f"{row.flops[kind] / 1e12:.3g}" if kind in row.flops else "" for kind in kinds),
         f"{row.host / 1e9:.0f}", f"{row.link / 1e9:.0f}")
        for name, row in DEVICES.items()
    )  # fmt: skip
    return markdown(head, rows, numbers=range(1, len(head)))


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (combinations, techniques, fallbacks, policies, states, devices)
}
