"""Peers for the forward pass of a layer: from float input to float output, with a quantized weight.

``OFFERS`` lists the peers of a ``linear`` call by input and weight scheme. Weights are packed for each peer before the
measurement, and layers are compiled if the peer's documentation recommends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.bench import probe
from lowbit.bench.timing import Case, usable
from lowbit.ops.linear import Linear
from lowbit.ops.spec import dtype_name


class Layer(NamedTuple):
    """The matrices of a call: ``x [M, K]`` and the dequantized weight ``[N, K]``, in x's dtype."""

    x: Tensor
    weight: Tensor
    group: int


def of(call: Linear) -> Iterator[Case]:
    """The peers of a call, each with its own operands."""
    x, n = call.x.reshape(-1, call.x.shape[-1]), call.weight.shape[0]
    yield probe.linear(x.shape[0], n, x.shape[1], x.dtype)
    if x.dtype == torch.float32:
        yield probe.medium(probe.linear(x.shape[0], n, x.shape[1], x.dtype))
    words = f"{call.input_scheme} x {call.scheme} on {dtype_name(x.dtype)}"
    offers = [offer for pattern, offer in OFFERS if re.fullmatch(pattern, words)]
    if not offers:
        return
    weight = torch.ops.lowbit.dequantize(
        call.weight, call.scheme, x.shape[1], call.scale, call.zero_point, call.global_scale, x.dtype
    )
    layer = Layer(x, weight, scaling.scheme(call.scheme).block[1] or x.shape[1])
    for offer in offers:
        yield from usable(lambda offer=offer: offer(layer))  # type: ignore[misc]


# -- int8 by int8 ------------------------------------------------------------------------------------------------------
def _int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(1).clamp_min(1e-9) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def _torch_dynamic(layer: Layer) -> Case:
    torch.backends.quantized.engine = "onednn"
    codes, scale = _int8_rows(layer.weight)
    zeros = torch.zeros(len(scale), dtype=torch.long)
    quantized = torch._make_per_channel_quantized_tensor(codes, scale.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return Case("torch linear_dynamic", lambda: torch.ops.quantized.linear_dynamic(layer.x, packed, False))


def _onednn_product(layer: Layer) -> Case:
    """The matmul only: its input is quantized before."""
    codes, scale = _int8_rows(layer.weight)
    x_scale = float(layer.x.abs().max()) / 127
    x = ((layer.x.float() / x_scale).round() + 128).to(torch.uint8)
    packed = torch.ops.onednn.qlinear_prepack(codes, list(x.shape))
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    run = torch.ops.onednn.qlinear_pointwise
    return Case(
        "onednn, product only",
        lambda: run(x, x_scale, 128, packed, scale, zeros, None, 1.0, 0, layer.x.dtype, "none", [], ""),
    )


def _onnx_dynamic(layer: Layer) -> Case:
    codes, scale = _int8_rows(layer.weight)
    inits = {"B": codes.t().contiguous(), "S": scale, "Z": torch.zeros(len(scale), dtype=torch.int8)}
    return _onnx("onnxruntime", "DynamicQuantizeMatMul", layer, inits)


@cache
def _compiled(*_: object) -> Callable[..., Tensor]:
    """One compiled forward pass per kind of layer. Earlier ones are dropped, because torch caches only a few."""
    torch._dynamo.reset()
    return torch.compile(lambda model, x: model(x), dynamic=False)  # type: ignore[no-any-return]


def _torchao(name: str) -> Callable[[Layer], Case]:
    def offer(layer: Layer) -> Case:
        from torchao import quantization

        config = getattr(quantization, name)()
        module = torch.nn.Linear(layer.x.shape[1], len(layer.weight), bias=False, dtype=layer.x.dtype)
        module.weight.data = layer.weight
        model = torch.nn.Sequential(module).requires_grad_(False)
        quantization.quantize_(model, config)
        run = _compiled(name, layer.x.shape, module.weight.shape, layer.x.dtype)
        return Case("torchao", lambda: run(model, layer.x))

    return offer


# -- weight-only -----------------------------------------------------------------------------------------------------
def _torch_int8pack(layer: Layer) -> Case:
    codes, scale = _int8_rows(layer.weight)
    scale = scale.to(layer.x.dtype)
    return Case("torch int8pack", lambda: torch._weight_int8pack_mm(layer.x, codes, scale))


def _int4_groups(layer: Layer) -> tuple[Tensor, Tensor]:
    """Codes 0..15 ``[N, K]`` and scales ``[N, groups]``."""
    groups = layer.weight.float().unflatten(1, (-1, layer.group))
    scale = groups.abs().amax(2).clamp_min(1e-9) / 7
    return ((groups / scale[..., None]).round() + 8).clamp(0, 15).flatten(1).to(torch.int32), scale


def _torch_int4pack(layer: Layer) -> Case | None:
    """Only if fast: for inputs other than bf16 it multiplies element by element."""
    if layer.x.dtype != torch.bfloat16 and len(layer.x) > 16:
        return None
    codes, scale = _int4_groups(layer)
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous().to(layer.x.dtype)
    return Case("torch int4pack", lambda: torch._weight_int4pack_mm_for_cpu(layer.x, packed, layer.group, pairs))


def _onnx_nbits(accuracy: int) -> Callable[[Layer], Case]:
    """Level 4 rounds the input to int8, block by block; level 0 leaves it in fp32."""

    def offer(layer: Layer) -> Case:
        codes, scale = _int4_groups(layer)
        codes = codes.to(torch.uint8).unflatten(1, (-1, layer.group))
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        inits = {"B": packed, "S": scale.reshape(-1)}
        sizes = {"K": layer.x.shape[1], "N": len(layer.weight), "bits": 4, "block_size": layer.group}
        name = "onnxruntime" + (" int8 input" if accuracy == 4 else "")
        return _onnx(name, "MatMulNBits", layer, inits, **sizes, accuracy_level=accuracy)

    return offer


def _onnx(who: str, op: str, layer: Layer, inits: dict[str, Tensor], **attributes: Any) -> Case:
    """A contrib operator of ONNX Runtime with fp32 input ``A`` and a preallocated output."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    shape = [layer.x.shape[0], len(layer.weight)]
    node = helper.make_node(op, ["A", *inits], ["Y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node], "layer",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, list(layer.x.shape))],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in inits.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning would slow other cases
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, out = session.io_binding(), torch.empty(shape)
    x = layer.x.float().contiguous()
    for bind, name, held in ((binding.bind_input, "A", x), (binding.bind_output, "Y", out)):
        bind(name, "cpu", 0, "float32", list(held.shape), held.data_ptr())
    return Case(who, lambda held=(x, out): session.run_with_iobinding(binding))  # type: ignore[misc]


def _bitsandbytes(layer: Layer) -> Case:
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(layer.weight, blocksize=layer.group, quant_type="nf4")
    return Case("bitsandbytes", lambda: bitsandbytes.matmul_4bit(layer.x, packed.t(), state))


#: Patterns of 'INPUT SCHEME x WEIGHT SCHEME on DTYPE', and the peers of each.
OFFERS: tuple[tuple[str, Callable[[Layer], Case | None]], ...] = (
    (r"int8:row x int8:row on fp32", _torch_dynamic),
    (r"int8:row x int8:row on .*", _onednn_product),
    (r"int8:row x int8:row on fp32", _onnx_dynamic),
    (r"int8:row x int8:row on .*", _torchao("Int8DynamicActivationInt8WeightConfig")),
    (r"None x int8:row on bf16", _torch_int8pack),
    (r"None x int8:row on .*", _torchao("Int8WeightOnlyConfig")),
    (r"None x fp8_e4m3:row on bf16", _torchao("Float8WeightOnlyConfig")),
    (r"None x int4:group\d+ on .*", _torch_int4pack),
    (r"None x int4:group\d+ on fp32", _onnx_nbits(0)),
    (r"int8:row x int4:group\d+ on fp32", _onnx_nbits(4)),
    (r"None x nf4 on .*", _bitsandbytes),
)
