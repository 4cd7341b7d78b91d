"""Schemes of lowbit and their names in compressed-tensors: formats and QuantizationArgs, in both directions."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit.files import shown
from lowbit.interop.files import Refusal
from lowbit.recipes import Cast, Recipe
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme

__all__ = [
    "FORMATS", "REORDERED", "Format", "cache_config", "group_of", "input_of", "is_static_cache", "refuses", "scheme_of",
]  # fmt: skip


class Format(NamedTuple):
    """A format of compressed-tensors.

    Attributes:
        name: Its name in ``config_groups``.
        storage: How codes are stored, a key of ``layouts.STORAGES``.
        type: The QuantizationArgs' ``type``.
        bits: The values of ``num_bits``.
        scales: The kind of scales: ``plain`` (fp32, bf16 or fp16), or a format of lowbit.
        strategies: The values of ``strategy``.
        inputs: Whether inputs are quantized; None: both are possible.
    """

    name: str
    storage: str
    type: str
    bits: tuple[int, ...]
    scales: str
    strategies: tuple[str, ...]
    inputs: bool | None = None


#: The values of ``actorder`` for columns in the order of activations, which have a ``weight_g_idx``.
REORDERED = ("group", "dynamic")

#: The bits of lowbit's integer formats.
_INTS = (2, 3, 4, 5, 6, 8)

#: One row per format. The first row that fits a recipe writes it.
FORMATS: tuple[Format, ...] = (
    Format("pack-quantized", "words", "int", _INTS, "plain", ("group", "channel", "tensor"), inputs=False),
    Format("int-quantized", "int8", "int", _INTS, "plain", ("group", "channel", "tensor"), inputs=True),
    Format("float-quantized", "float8", "float", (8,), "plain", ("group", "channel", "tensor", "block"), True),
    Format("naive-quantized", "float8", "float", (8,), "plain", ("group", "channel", "tensor", "block"), False),
    Format("nvfp4-pack-quantized", "bytes", "float", (4,), "fp8_e4m3", ("tensor_group",)),
    Format("mxfp4-pack-quantized", "bytes", "float", (4,), "e8m0", ("group",)),
    Format("mxfp6-pack-quantized", "bytes", "float", (6,), "e8m0", ("group",)),
    Format("mxfp8-quantized", "float8", "float", (8,), "e8m0", ("group",)),
    Format("naive-quantized", "int8", "int", _INTS, "plain", ("group", "channel", "tensor")),
)  # fmt: skip

#: ``type`` and ``num_bits`` of each element format.
_ELEMENTS: dict[str, tuple[str, int]] = {
    **{f"{sign}int{bits}": ("int", bits) for sign in ("", "u") for bits in _INTS},
    "fp8_e4m3": ("float", 8), "fp6_e2m3": ("float", 6), "fp4_e2m1": ("float", 4),
}  # fmt: skip

#: Options of lowbit's schemes for plain scales, by the dtype of the stored scales.
_SCALE_OPTIONS = {"float32": "", "bfloat16": ":bf16", "float16": ":fp16"}

#: The dtypes of scales that are codes, in QuantizationArgs.
_SCALE_DTYPES = {"e8m0": "torch.uint8", "fp8_e4m3": "torch.float8_e4m3fn"}

#: The nearest recipe by the kind and bits of the weight's format, without and with quantized inputs.
_NEAREST = {
    ("float", 8): ("fp8-weight-only", "fp8"),
    ("float", 6): ("mxfp6-weight-only", "mxfp6"),
    ("float", 4): ("nvfp4-weight-only", "mxfp4"),
    ("integer", 8): ("int8-weight-only", "int8"),
    ("integer", 4): ("int4-weight-only", "w4a8"),
}  # fmt: skip


# -- from lowbit -------------------------------------------------------------------------------------------------------
def refuses(recipe: Recipe) -> Refusal | None:
    """Why weights and inputs of ``recipe`` cannot be written; None if they can."""
    made = _group(recipe)
    return None if isinstance(made, tuple) else Refusal(made, _nearest(recipe))


def group_of(recipe: Recipe) -> tuple[Format, dict[str, Any]]:
    """The format of a recipe's weights, and its ``config_groups`` entry without ``targets``.

    Raises:
        ValueError: compressed-tensors cannot express the recipe.
    """
    made = _group(recipe)
    if isinstance(made, str):
        raise ValueError(f"recipe {recipe.name!r}: {made}; the nearest recipe that works is {_nearest(recipe)!r}")
    return made


def _group(recipe: Recipe) -> tuple[Format, dict[str, Any]] | str:
    """``group_of``, or the reason why it is impossible."""
    if recipe.rotation is not None:
        return "its weights are rotated by a Hadamard transform, and readers would not rotate the inputs"
    if recipe.reordered:
        return "its columns are in the order of activations, which compressed-tensors reads no longer"
    weights = _weight_args(recipe.weight)
    inputs = _input_args(recipe.output.a)
    for made in (weights, inputs):
        if isinstance(made, str):
            return made
    assert isinstance(weights, dict) and not isinstance(inputs, str)
    scales = recipe.weight.scale_format.name
    fitting = (
        row
        for row in FORMATS
        if row.type == weights["type"]
        and weights["num_bits"] in row.bits
        and row.scales == (scales if scales in _SCALE_DTYPES else "plain")
        and weights["strategy"] in row.strategies
        and row.inputs in (None, inputs is not None)
    )
    format = next(fitting, None)
    if format is None:
        return f"no format has weights in {recipe.weight}"
    group = {"weights": weights, "input_activations": inputs, "output_activations": None, "format": format.name}
    return format, group


def _weight_args(scheme: Scheme) -> dict[str, Any] | str:
    if scheme.full:
        return f"scales of {scheme} may be negative, and readers expect positive ones"
    args = _args(scheme)
    if args is None or scheme.reference_only:  # minima and superblocks
        return f"no format has weights in {scheme}"
    if scheme.affine and args["strategy"] not in ("group", "channel"):
        return "zero points are only stored for groups or rows"
    return {**args, "dynamic": False}


def _input_args(cast: Any) -> dict[str, Any] | str | None:
    if cast is None:
        return None
    scheme: Scheme = cast.scheme
    args = _args(scheme)
    if scheme.global_scale:
        return (
            f"inputs in {scheme} have a global scale from each row, and compressed-tensors one that calibration stores"
        )
    if (
        args is None
        or scheme.full
        or scheme.minimum
        or args["strategy"] == "block"
        or scheme.scale_format.name not in ("fp32", "e8m0")
    ):
        return f"no format has inputs in {scheme}"
    if cast.scale == "static":
        return {**args, "dynamic": False} if args["strategy"] == "tensor" else f"static scales of {scheme} are not read"
    strategy = {"channel": "token"}.get(args["strategy"], args["strategy"])
    return {**args, "strategy": strategy, "dynamic": True}


def _args(scheme: Scheme) -> dict[str, Any] | None:
    """The QuantizationArgs of a scheme without ``dynamic``, or None if no arguments describe it."""
    element, scaling = _ELEMENTS.get(scheme.format.name), _scaling_args(scheme)
    if element is None or scaling is None:
        return None
    return {"num_bits": element[1], "type": element[0], "symmetric": not scheme.affine, **scaling}


def _scaling_args(scheme: Scheme) -> dict[str, Any] | None:
    rows, cols = scheme.block
    scales = scheme.scale_format.name
    if scales in _SCALE_DTYPES:  # only in the blocks of MX and NVFP4
        wanted = {"e8m0": (1, 32), "fp8_e4m3": (1, 16)}[scales]
        if scheme.block != wanted or scheme.format.kind != "float":
            return None
        strategy = "group" if scales == "e8m0" else "tensor_group"
        return {"strategy": strategy, "group_size": cols, "scale_dtype": _SCALE_DTYPES[scales]}
    if rows is None or cols is None:
        if cols is not None or rows not in (None, 1):
            return None
        return {"strategy": "tensor" if rows is None else "channel"}
    if rows == 1:
        return {"strategy": "group", "group_size": cols}
    return {"strategy": "block", "block_structure": [rows, cols]}


def _nearest(recipe: Recipe) -> str:
    """The name of a recipe that can be written, with the same bits and kind of elements if there is one."""
    format = recipe.weight.format
    names = _NEAREST.get((format.kind, format.bits))
    if names is not None:
        return names[recipe.input is not None]
    return "int4-weight-only" if format.bits == 4 else f"int{min(b for b in _INTS if b >= format.bits)}-weight-only:row"


# -- to lowbit ---------------------------------------------------------------------------------------------------------
def scheme_of(args: dict[str, Any], format: str, scale_dtype: str) -> tuple[Format, Scheme]:
    """The row of ``FORMATS`` and the scheme for weights.

    Args:
        args: The QuantizationArgs of the weights, from an untrusted file.
        format: The name of the format.
        scale_dtype: The dtype of the stored scales, such as ``"bfloat16"``.

    Raises:
        ValueError: lowbit has no such scheme.
    """
    if args.get("dynamic"):
        raise ValueError("its weights are quantized dynamically; quantize the original model with lowbit.quantize_")
    row = next(
        (
            row
            for row in FORMATS
            if row.name == format
            and row.type == args.get("type", "int")
            and args.get("num_bits", 8) in row.bits
            and args.get("strategy") in row.strategies
        ),
        None,
    )
    if row is None:
        raise ValueError(f"lowbit reads no weights of format {shown(format)} with {shown(args)}")
    option = _SCALE_OPTIONS.get(scale_dtype) if row.scales == "plain" else ""
    if option is None:
        raise ValueError(f"its scales are {scale_dtype}, expected one of {', '.join(_SCALE_OPTIONS)}")
    scaling = {"plain": None, "e8m0": "mx", "fp8_e4m3": "nvfp4"}[row.scales]
    if scaling is not None and args.get("group_size") != (expected := {"mx": 32, "nvfp4": 16}[scaling]):
        raise ValueError(f"groups of {format} have {expected} elements, not {shown(args.get('group_size'))}")
    return row, _scheme(args, scaling or _scaling_name(args), option)


def input_of(args: Any) -> Cast | None:
    """How inputs are quantized, from the ``input_activations`` of an untrusted file; None: not at all.

    Raises:
        ValueError: lowbit has no such scheme.
    """
    if args is None:
        return None
    if not isinstance(args, dict):
        raise ValueError(f"input_activations must be an object, got {shown(args)}")
    strategy, dynamic = args.get("strategy"), args.get("dynamic", False)
    if strategy == "tensor_group":  # the global scale is of each row here, and of calibration there
        return Cast("nvfp4:global_row")
    if strategy == "group" and args.get("scale_dtype") == _SCALE_DTYPES["e8m0"]:
        return Cast(_scheme(args, "mx", ""))
    if strategy not in ("token", "tensor", "group") or (dynamic is not True and strategy != "tensor"):
        raise ValueError(f"lowbit reads no inputs with {shown(args)}")
    name = "row" if strategy == "token" else _scaling_name(args)
    return Cast(_scheme(args, name, ""), scale="current" if dynamic else "static")


def _scheme(args: dict[str, Any], scaling: str, option: str) -> Scheme:
    element = (args.get("type", "int"), args.get("num_bits", 8))
    affine = args.get("symmetric", True) is False
    name = next(
        (name for name, known in _ELEMENTS.items() if known == element and name.startswith("u") == affine), None
    )
    if name is None:
        raise ValueError(f"lowbit has no elements with {shown(args)}")
    return find_scheme(f"{name}:{scaling}{':affine' if affine else ''}{option}")


def _scaling_name(args: dict[str, Any]) -> str:
    """The name of a plain scaling. Raises ValueError for sizes that are no positive integers."""
    strategy = args.get("strategy")
    sizes = {"group": [args.get("group_size")], "block": args.get("block_structure")}.get(str(strategy), [])
    known = isinstance(sizes, list) and all(isinstance(n, int) and 0 < n < 1 << 31 for n in sizes)
    if not known or len(sizes or ()) != {"group": 1, "block": 2}.get(str(strategy), 0):
        raise ValueError(f"strategy {shown(strategy)} has the sizes {shown(sizes)}, expected positive integers")
    if strategy == "group":
        return f"group{sizes[0]}"  # type: ignore[index]
    return "block{}x{}".format(*sizes) if strategy == "block" else {"channel": "row"}.get(str(strategy), "tensor")  # type: ignore[misc]


# -- KV cache ----------------------------------------------------------------------------------------------------------
def cache_config(scales: int) -> dict[str, Any]:
    """The ``kv_cache_scheme`` of FP8 keys and values with one static scale, or with one scale per head."""
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor" if scales == 1 else "attn_head",
        "symmetric": True,
        "dynamic": False,
    }


def is_static_cache(args: Any) -> bool:
    """Whether a ``kv_cache_scheme`` is one of ``cache_config``."""
    rows = [cache_config(count) for count in (1, 2)]
    return isinstance(args, dict) and any(row.items() <= {**args}.items() for row in rows)
