"""Other quantization packages to compare with, with the settings that their documentation recommends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.protect import output_layers_protected
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.models.ties import tensor_bytes

__all__ = ["PEERS", "Peer", "bytes_of", "find"]


class Peer(NamedTuple):
    """A package with settings."""

    name: str
    about: str
    packages: tuple[str, ...]
    """Packages to install."""
    quantize: Callable[[nn.Module], None]
    """Quantizes the Linear layers of a float model in place."""

    def missing(self) -> str | None:
        """The command that installs missing packages, or None."""
        absent = [name for name in self.packages if find_spec(_MODULES.get(name, name)) is None]
        return f"pip install {' '.join(absent)}" if absent else None


#: Import names that differ from the package name.
_MODULES = {"optimum-quanto": "optimum.quanto"}


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of all Linear layers except output layers, which lowbit skips too."""
    protection = output_layers_protected(model, DEFAULT_SKIP)
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and protection(f"{path}.{name}".lstrip("."), layer) is None:
                yield module, name, layer


def _torchao(config: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import torchao.quantization as torchao

        layers = {id(layer) for _, _, layer in _linears(model)}
        torchao.quantize_(model, config(torchao), filter_fn=lambda module, name: id(module) in layers)

    return quantize


def _int4(group: int, **options: Any) -> Callable[[nn.Module], None]:
    return _torchao(
        lambda ao: ao.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, "int4"),  # noqa: B009 (torch's stubs lack it)
            granularity=ao.PerGroup(group),
            **options,
        )
    )


def _bitsandbytes(model: nn.Module) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module, name, layer in _linears(model):
        dtype, biased = layer.weight.dtype, layer.bias is not None
        replacement = Linear4bit(layer.in_features, layer.out_features, biased, compute_dtype=dtype, quant_type="nf4")
        replacement.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        replacement.bias = layer.bias
        setattr(module, name, replacement.to(layer.weight.device))


def _quanto(model: nn.Module) -> None:
    from optimum.quanto import freeze, qint4, quantize

    quantized = {id(layer) for _, _, layer in _linears(model)}
    others = [name for name, layer in model.named_modules() if type(layer) is nn.Linear and id(layer) not in quantized]
    quantize(model, weights=qint4, exclude=others)
    freeze(model)


def _hqq(group: int) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        for module, name, layer in _linears(model):
            config = BaseQuantizeConfig(nbits=4, group_size=group)
            replacement = HQQLinear(layer, config, compute_dtype=layer.weight.dtype, device=str(layer.weight.device))
            setattr(module, name, replacement)

    return quantize


#: All peers. Result files contain the names.
PEERS: dict[str, Peer] = {
    row.name: row
    for row in (
        Peer(
            "torchao:int8", "Int8DynamicActivationInt8WeightConfig", ("torchao",),
            _torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)),
        ),
        Peer("torchao:int4-group128", "IntxWeightOnlyConfig, symmetric", ("torchao",), _int4(128)),
        Peer("torchao:int4-group32", "IntxWeightOnlyConfig, symmetric", ("torchao",), _int4(32)),
        Peer(
            "torchao:int4-group128-hqq", "IntxWeightOnlyConfig, HQQ's scales", ("torchao",),
            _int4(128, intx_choose_qparams_algorithm="hqq_scale_only"),
        ),
        Peer(
            "torchao:int4-group32-hqq", "IntxWeightOnlyConfig, HQQ's scales", ("torchao",),
            _int4(32, intx_choose_qparams_algorithm="hqq_scale_only"),
        ),
        Peer("bitsandbytes:nf4", "Linear4bit, blocks of 64", ("bitsandbytes",), _bitsandbytes),
        Peer("quanto:int4", "qint4, groups of 128, zero points", ("optimum-quanto",), _quanto),
        Peer("hqq:int4-group64", "HQQLinear, groups of 64, zero points", ("hqq",), _hqq(64)),
        Peer("hqq:int4-group128", "HQQLinear, groups of 128, zero points", ("hqq",), _hqq(128)),
    )
}  # fmt: skip


def find(name: str) -> Peer:
    """The peer called ``name``. Raises ValueError if it is unknown, and ImportError if it is not installed."""
    if name not in PEERS:
        raise ValueError(f"unknown peer {name!r}; expected one of {', '.join(PEERS)}")
    missing = PEERS[name].missing()
    if missing is not None:
        raise ImportError(f"{name} is not installed; get it with: {missing}")
    return PEERS[name]


def bytes_of(model: nn.Module) -> int:
    """Bytes of all tensors of ``model``, also inside tensor subclasses and attributes of layers."""
    return tensor_bytes(
        tensor
        for module in model.modules()
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        for tensor in _plain(value)
    )


def _plain(value: Any) -> Iterator[Tensor]:
    """The plain tensors inside ``value``."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _plain(part)
        return
    if not isinstance(value, Tensor):
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _plain(getattr(value, name))
        return
    yield value.data
    state = getattr(value, "quant_state", None)  # bitsandbytes
    for part in vars(state).values() if state is not None else ():
        yield from _plain(part)
