"""Finds parts of a model that checkpointing selects: attention and feed-forward of a block, stages of a conv net."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from lowbit.models.wrap import plain_class
from lowbit.nn.attention import MultiheadForward
from lowbit.torch_private import AvgPoolNd, ConvNd, ConvTransposeNd, MaxPoolNd

__all__ = ["PARTS", "BlockFunction", "Segments", "find_part", "find_stages", "own_layers", "split_part"]

#: Pattern of the names or class names of modules, by part of a block.
PARTS = {
    "attention": re.compile(r"attn|attention|(^|_)(mha|att)(_|$)|(?-i:Att(?![a-z]))", re.IGNORECASE),
    "mlp": re.compile(r"mlp|ffn|(^|_)ff$|feed_?forward|moe|experts$|LayerFF|DenseActDense", re.IGNORECASE),
}
#: Feed-forward parts that are not one module: names of the consecutive children.
_MLP_CHILDREN = (
    ("intermediate", "output"), ("fc1", "activation_fn", "fc2"), ("linear1", "activation", "dropout", "linear2"),
)  # fmt: skip
#: Names of a part's normalization or dropout.
_BESIDES = re.compile(r"norm|dropout|ln_", re.IGNORECASE)

#: The layers that compute attention as a whole.
_ATTENTION = (nn.MultiheadAttention, MultiheadForward)


class BlockFunction(NamedTuple):
    """A function that is an attribute of a block, such as ``activation`` of ``nn.TransformerEncoderLayer``."""

    block: nn.Module
    name: str


Segments = list[Sequence[nn.Module | BlockFunction]]


def find_part(block: nn.Module, part: str) -> Segments:
    """Return the modules, or runs of consecutive modules and functions, that are this ``part`` of a block.

    They are found by name or class name. Attention is also found by an ``nn.MultiheadAttention`` inside. Beside
    attention, a module with two or more layers is the feed-forward part if no name says so. May be empty.
    """
    segments: Segments = []
    covered: set[str] = set()
    for path, module in block.named_modules():
        if not path or any(path.startswith(f"{above}.") for above in covered):
            continue
        name = path.rsplit(".", 1)[-1]
        words = (name, plain_class(module).__name__)
        if _BESIDES.search(name) or "Norm" in words[1] or not _multiplies(module):
            continue
        attends = _attends(module)
        if any(PARTS[other].search(words[1]) or PARTS[other].search(name) for other in PARTS if other != part):
            if not PARTS[part].search(words[1]):
                covered.add(path)
                continue
        if any(PARTS[part].search(word) for word in words) or (attends and part == "attention"):
            segments.append([module])
            covered.add(path)
        elif attends:
            covered.add(path)
    if part == "mlp" and not segments:
        segments += _mlp_children(block) or _beside_attention(block)
    return segments


def _attends(module: nn.Module) -> bool:
    """Return whether a module that is called consists of ``nn.MultiheadAttention``, with one other layer at most."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    attention = [inner for inner in module.modules() if isinstance(inner, _ATTENTION)]
    inside = {id(inner) for layer in attention for inner in layer.modules()}
    return bool(attention) and sum(id(layer) not in inside for layer in _layers(module)) <= 1


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers with weight matrices in a module."""
    return [inner for inner in module.modules() if any(p.dim() > 1 for p in inner.parameters(recurse=False))]


def _mlp_children(block: nn.Module) -> Segments:
    """Return the consecutive children, with functions between them, of a row of ``_MLP_CHILDREN``."""
    children: dict[str, nn.Module | BlockFunction] = dict(block.named_children())
    # A copy of nn.TransformerDecoderLayer has a function beside its activation module, and calls the function.
    functions = {name for row in _MLP_CHILDREN for name in row if callable(vars(block).get(name))}
    children |= {name: BlockFunction(block, name) for name in functions}
    rows = [row for row in _MLP_CHILDREN if all(name in children for name in row)]
    return [[children[name] for name in row] for row in rows[:1]]


def _beside_attention(block: nn.Module) -> Segments:
    """Return the children with two or more layers, if the block has attention and they have none."""
    attention = {id(module) for segment in find_part(block, "attention") for module in segment}
    return [
        [child]
        for child in block.children()
        if attention
        and attention.isdisjoint(map(id, child.modules()))
        and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and len(_layers(child)) > 1
    ]


def split_part(block: nn.Module, part: str) -> tuple[list[str], list[str]]:
    """Return the layers and the methods between them that form this ``part``, by name, if it includes methods."""
    children = {name for name, _ in block.named_children()}
    for row in _MLP_CHILDREN if part == "mlp" else ():
        layers = [name for name in row if name in children]
        functions = [name for name in row if name not in children and callable(getattr(block, name, None))]
        if layers and functions and len(layers) + len(functions) == len(row):
            return layers, functions
    return [], []


def own_layers(block: nn.Module) -> list[str]:
    """Return the names of the block's children that are single layers, which its own forward calls."""
    return [name for name, child in block.named_children() if _layers(child) == [child]]


def find_stages(model: nn.Module) -> list[Sequence[nn.Module]]:
    """Return the blocks of a convolutional net up to its last down-sampling.

    Layers directly in a Sequential are grouped up to each down-sampling. Single layers are excluded, because they have
    nothing to recompute.
    """
    units: list[Sequence[nn.Module]] = []
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
    early_units = units[: last + 1 if len(units[last]) > 1 else last]
    return [unit for unit in early_units if len(unit) > 1 or any(True for _ in unit[0].children())]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the model's Sequentials and block lists. If that is one module, yield its children."""
    units = list(_below(module))
    while len(inner := [unit for unit in units if any(map(_convolves, unit.children()))]) == 1 and all(
        unit in inner or _is_strided(unit) for unit in units
    ):
        units = list(_below(inner[0]))
    yield from units


def _below(module: nn.Module) -> Iterator[nn.Module]:
    for parent, child in _in_turn(module):
        if _convolves(child) and (plain_class(child) in (nn.Sequential, nn.ModuleList) or _is_loop(child)):
            yield from _below(child)
        elif isinstance(parent, nn.Sequential) or (isinstance(parent, nn.ModuleList) and _downsamples(parent)):
            yield child
        elif _convolves(child) and (_is_strided(child) or any(True for _ in child.children())):
            yield child


def _in_turn(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the children of a module in the order of their calls, each with its parent.

    Two lists may be iterated together, as in ConvNeXt: down-samplings, and the blocks after each of them.
    """
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    paired = next((pair for pair in itertools.permutations(lists, 2) if _go_together(*pair)), ())
    for child in module.children():
        if child not in paired:
            yield module, child
        elif child is next(modules for modules in lists if modules in paired):
            rows = itertools.zip_longest(*(reversed(list(modules)) for modules in paired))  # aligned at the end
            for row in reversed(list(rows)):
                yield from ((parent, unit) for parent, unit in zip(paired, row, strict=True) if unit is not None)


def _go_together(down: nn.ModuleList, blocks: nn.ModuleList) -> bool:
    """Return whether the modules of both lists alternate, aligned at the end.

    Then each module of ``down``, and no module of ``blocks``, down-samples, and its output channels fit its partner.
    """
    pairs = list(zip(reversed(list(down)), reversed(list(blocks)), strict=False))
    return bool(pairs) and all(
        _downsamples(down_sampling)
        and not _downsamples(block)
        and [m.out_channels for m in _convolutions(down_sampling)][-1:]
        == [m.in_channels for m in _convolutions(block)][:1]
        for down_sampling, block in pairs
    )


def _is_loop(module: nn.Module) -> bool:
    """Return whether a module calls blocks in sequence: those of a list, or of its only child, a Sequential."""
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
    """Return whether a module has children, or weight matrices."""
    return any(True for _ in module.children()) or any(p.dim() > 1 for p in module.parameters(recurse=False))
