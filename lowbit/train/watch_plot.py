"""The plot of ``Watch``: per matmul operand, SQNR over steps and the underflow of the worst layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lowbit.train.watch_rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["drawn"]

#: The rows of one role, by layer and step.
_Layers = Mapping[str, Mapping[int, Row]]

#: Each role in words: the operand and its matmul.
_TITLES = {
    "output.a": ("Input of the layer", "in the matmul for its output"),
    "output.b": ("Weight", "in the matmul for the output"),
    "grad_input.a": ("Gradient of the output", "in the matmul for the input's gradient"),
    "grad_input.b": ("Weight", "in the matmul for the input's gradient"),
    "grad_weight.a": ("Gradient of the output", "in the matmul for the weight's gradient"),
    "grad_weight.b": ("Input of the layer", "in the matmul for the weight's gradient"),
}
#: Font sizes in points for a figure of this width in inches, which fits a page.
_STYLE = {
    "font.size": 9, "axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
_WIDTH = 8.5
#: Colours of the worst layers, one each, and the colour of all others.
_COLOURS, _PALE = ("#d9480f", "#2f6fde", "#862e9c"), "#9aa5b1"
#: Maximum number of layers in a heat map, and of labelled steps.
_MOST_LAYERS, _MOST_STEPS = 10, 8
#: Maximum length of a label; longer names are shortened in the middle.
_LONGEST = 28


def drawn(rows: Sequence[Row]) -> Figure:
    """Draw the recorded rows.

    Args:
        rows: rows of all steps.

    Returns:
        A figure with two panels per role: lines, and a heat map.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("train.watch: a plot needs matplotlib: pip install matplotlib") from None
    roles: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        roles.setdefault(row.role, {}).setdefault(row.layer, {})[row.step] = row
    if not roles:
        raise ValueError("train.watch: no step was watched, so there is nothing to draw; train with the watch open")
    common, names = _short_names(list(dict.fromkeys(row.layer for row in rows)))
    most = max(100 * max(row.underflow for row in rows), 1e-3)
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 0.6 + 2.6 * len(roles)), layout="constrained")
        panels = figure.subplots(len(roles), 2, squeeze=False, width_ratios=(1.2, 1))
        for (role, layers), (lines, heat) in zip(roles.items(), panels, strict=True):
            _draw_lines(lines, role, layers, names)
            image = _draw_heat(heat, layers, names, most)
        for axes in panels[-1]:
            axes.set_xlabel("training step")
        figure.colorbar(image, ax=list(panels[:, 1]), label="elements that became zero (underflow), %", aspect=40)
        note = f"\nlayers are named without '{common}.'" if common else ""
        figure.suptitle(f"Quantization error of each matmul operand{note}", size=10)
    return figure


def _draw_lines(axes: Axes, role: str, layers: _Layers, names: Mapping[str, str]) -> None:
    """SQNR over steps: the worst layers in colours, the others pale."""
    worst = sorted(layers, key=lambda layer: _least_sqnr(layers[layer]))[: len(_COLOURS)]
    rest = [layer for layer in layers if layer not in worst]
    for rank, (layer, colour) in enumerate(zip(worst, _COLOURS, strict=False)):
        label = names[layer] + (" (worst)" if rest and not rank else "")
        _line(axes, layers[layer], color=colour, lw=1.6, ms=4, zorder=3, label=label)
    for rank, layer in enumerate(rest):
        count = f"{len(rest)} other layer{'s' if len(rest) > 1 else ''}"
        _line(axes, layers[layer], color=_PALE, lw=0.7, ms=2, label=None if rank else count)
    operand, matmul = _TITLES.get(role, (role, ""))
    axes.set_title(f"{operand}\n{matmul} ({role})", loc="left")
    axes.set_ylabel("SQNR, dB (more is better)")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.5 * (high - low))  # room for the legend
    axes.legend(loc="upper left", ncols=2, frameon=False, handlelength=1.5, columnspacing=1)
    _whole_steps(axes)


def _line(axes: Axes, steps: Mapping[int, Row], **style: Any) -> None:
    axes.plot(list(steps), [row.sqnr for row in steps.values()], marker="o", **style)


def _least_sqnr(steps: Mapping[int, Row]) -> float:
    """The smallest SQNR; Inf if no row has one."""
    return min((row.sqnr for row in steps.values() if not math.isnan(row.sqnr)), default=math.inf)


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(_MOST_STEPS, integer=True))


def _draw_heat(axes: Axes, layers: _Layers, names: Mapping[str, str], most: float) -> Any:
    """Underflow over steps, of all layers or of the layers with the most, in the order of the model."""
    largest = {layer: max(row.underflow for row in steps.values()) for layer, steps in layers.items()}
    worst = set(sorted(layers, key=lambda layer: -largest[layer])[:_MOST_LAYERS])
    drawn = [layer for layer in names if layer in worst]
    steps = sorted({step for rows in layers.values() for step in rows})
    shares = [
        [100 * layers[name][step].underflow if step in layers[name] else math.nan for step in steps] for name in drawn
    ]
    every = -(-len(steps) // _MOST_STEPS)
    axes.set_yticks(range(len(drawn)), [names[layer] for layer in drawn])
    axes.set_xticks(range(0, len(steps), every), [str(step) for step in steps[::every]])
    title = "all layers" if len(drawn) == len(layers) else f"the {len(drawn)} worst of {len(layers)} layers"
    axes.set_title(f"Became zero (underflow)\n{title}", loc="left")
    return axes.imshow(shares, aspect="auto", interpolation="nearest", vmin=0, vmax=most, cmap="magma_r")


# -- names ------------------------------------------------------------------------------------------------------------
def _short_names(layers: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The path prefix that all layers share, and the rest of each layer's name."""
    paths = [layer.split(".") for layer in layers]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    shared = shared if len(paths) > 1 else 0
    return ".".join(paths[0][:shared]), {
        layer: _shortened(".".join(path[shared:]) or "the model") for layer, path in zip(layers, paths, strict=True)
    }


def _shortened(name: str) -> str:
    """Shorten a long name in the middle, because its beginning has the number of the block."""
    head = _LONGEST // 3
    return name if len(name) <= _LONGEST else f"{name[:head]}…{name[-(_LONGEST - head - 1) :]}"
