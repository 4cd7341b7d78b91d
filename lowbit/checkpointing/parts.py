"""Where the parts of a model are that are worth checkpointing: its stacks of blocks, attention and feed-forward in a
block, the stages of a convolutional net.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lowbit.models.wrap import plain_class
from lowbit.torch_private import AvgPoolNd, ConvNd, ConvTransposeNd, MaxPoolNd

__all__ = ["PARTS", "find_part", "find_stages", "split_part"]

#: By the part of a block: what the name of such a module, or of its class, has in it.
PARTS = {
    "attention": re.compile(r"attn|attention|(^|_)mha$", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|(^|_)ff$|feed_?forward|moe|experts$|LayerFF|DenseActDense", re.IGNORECASE),
}
#: Feed-forward parts that are no module: the names of the children that follow one another in it.
_MLP_CHILDREN = (
    ("intermediate", "output"), ("fc1", "activation_fn", "fc2"), ("linear1", "activation", "dropout", "linear2"),
)  # fmt: skip
#: What has one of these words in its name is a part's normalization or dropout.
_BESIDES = re.compile(r"norm|dropout|ln_", re.IGNORECASE)

Segments = list[Sequence[nn.Module]]


def find_part(block: nn.Module, part: str) -> Segments:
    """The modules, or modules that follow one another, that are this ``part`` of a block; none where it has none."""
    found: Segments = []
    taken: set[str] = set()
    for path, module in block.named_modules():
        if not path or any(path.startswith(f"{above}.") for above in taken):
            continue
        name = path.rsplit(".", 1)[-1]
        words = (name, plain_class(module).__name__)
        if _BESIDES.search(name) or "Norm" in words[1] or not _multiplies(module):
            continue
        if any(PARTS[other].search(words[1]) or PARTS[other].search(name) for other in PARTS if other != part):
            if not PARTS[part].search(words[1]):
                taken.add(path)
                continue
        if any(PARTS[part].search(word) for word in words):
            found.append([module])
            taken.add(path)
    if part == "mlp" and not found:
        children = dict(block.named_children())
        rows = [row for row in _MLP_CHILDREN if all(name in children for name in row)]
        found += [[children[name] for name in row] for row in rows[:1]]
    return found


def split_part(block: nn.Module, part: str) -> tuple[list[str], list[str]]:
    """The layers and the functions between them, by name, that are this ``part`` of a block where some of it are
    functions; none where there are no such layers.
    """
    children = {name for name, _ in block.named_children()}
    for row in _MLP_CHILDREN if part == "mlp" else ():
        layers = [name for name in row if name in children]
        functions = [name for name in row if name not in children and callable(getattr(block, name, None))]
        if layers and functions and len(layers) + len(functions) == len(row):
            return layers, functions
    return [], []


def find_stages(model: nn.Module) -> Segments:
    """Of a convolutional net what comes before its last down-sampling, by blocks; layers that stand in a Sequential
    of their own are taken together, up to each down-sampling. One layer alone has nothing inside to recompute.
    """
    units: Segments = []
    loose: list[nn.Module] = []
    for module in _units(model):
        leaf = not any(True for _ in module.children())
        if not leaf and loose:
            units.append(loose)
            loose = []
        if not leaf:
            units.append([module])
            continue
        loose.append(module)
        if _downsamples(module):
            units.append(loose)
            loose = []
    strided = [i for i, unit in enumerate(units) if any(map(_downsamples, unit))]
    if not strided:
        return []
    last = strided[-1]
    before = units[: last + 1 if len(units[last]) > 1 else last]
    return [unit for unit in before if len(unit) > 1 or any(True for _ in unit[0].children())]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The children of the model's Sequentials and lists of blocks, down to what is none of these; where they are one
    module, its children.
    """
    found = list(_below(module))
    while len(inner := [unit for unit in found if any(map(_convolves, unit.children()))]) == 1 and all(
        unit in inner or _is_strided(unit) for unit in found
    ):
        found = list(_below(inner[0]))
    yield from found


def _below(module: nn.Module) -> Iterator[nn.Module]:
    for place, child in _in_turn(module):
        if _convolves(child) and (plain_class(child) in (nn.Sequential, nn.ModuleList) or _is_loop(child)):
            yield from _below(child)
        elif isinstance(place, nn.Sequential) or (isinstance(place, nn.ModuleList) and _downsamples(place)):
            yield child
        elif _convolves(child) and (_is_strided(child) or any(True for _ in child.children())):
            yield child


def _in_turn(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The children of a module, each with the one that it is a child of. Of two lists that are gone through together,
    down-samplings and the blocks after each of them (as ConvNeXt has), the modules in this order.
    """
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    together = next((pair for pair in itertools.permutations(lists, 2) if _go_together(*pair)), ())
    for child in module.children():
        if child not in together:
            yield module, child
        elif child is next(one for one in lists if one in together):
            rows = itertools.zip_longest(*(reversed(list(one)) for one in together))  # the last ones belong together
            for row in reversed(list(rows)):
                yield from ((place, one) for place, one in zip(together, row, strict=True) if one is not None)


def _go_together(down: nn.ModuleList, blocks: nn.ModuleList) -> bool:
    """Whether each module of ``down`` makes the channels that the one of ``blocks`` takes that is as far from the end,
    and it alone down-samples.
    """
    pairs = list(zip(reversed(list(down)), reversed(list(blocks)), strict=False))
    return bool(pairs) and all(
        _downsamples(before)
        and not _downsamples(after)
        and [m.out_channels for m in _convolutions(before)][-1:] == [m.in_channels for m in _convolutions(after)][:1]
        for before, after in pairs
    )


def _is_loop(module: nn.Module) -> bool:
    """Whether a module calls blocks one after another: those of a list, or of the only Sequential that it has."""
    children = [child for child in module.children() if _convolves(child)]
    lists = any(isinstance(child, nn.ModuleList) for child in children)
    return lists or (len(list(module.children())) == 1 and isinstance(children[0], nn.Sequential))


def _convolutions(module: nn.Module) -> list[ConvNd]:
    return [m for m in module.modules() if isinstance(m, ConvNd)]


def _convolves(module: nn.Module) -> bool:
    return bool(_convolutions(module))


def _downsamples(module: nn.Module) -> bool:
    return any(map(_is_strided, module.modules()))


def _is_strided(layer: nn.Module) -> bool:
    down = isinstance(layer, ConvNd | MaxPoolNd | AvgPoolNd) and not isinstance(layer, ConvTransposeNd)
    return down and any(s > 1 for s in _numbers(layer.stride))


def _numbers(stride: Any) -> Sequence[int]:
    return (stride,) if isinstance(stride, int) else tuple(stride)


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has layers inside, or matrices of its own."""
    return any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters(recurse=False))
