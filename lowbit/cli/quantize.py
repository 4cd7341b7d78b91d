"""``lowbit quantize``: a model's directory in, a smaller one out."""

from __future__ import annotations

import re
import shutil
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text
from torch import nn

from lowbit.cli.console import errors, out, print_json
from lowbit.convert import quantize_
from lowbit.convert.engine import quantized_layers
from lowbit.files import check_regular
from lowbit.recipes import RECIPES
from lowbit.recipes import recipe as find_recipe
from lowbit.serialize import load_model, save_model
from lowbit.serialize.huggingface import from_directory, is_directory
from lowbit.serialize.layout import CONFIG, our_config

EPILOG = """
**Examples**

`lowbit quantize out/demo/model int8` — the model that `lowbit train` made

`lowbit quantize SmolLM2-135M int4-weight-only:group32 --out small` — a directory of transformers (config.json and
safetensors)

Then, in Python: `model = lowbit.load_model("small")`

Recipes: {recipes}
"""

#: What is copied beside the weights: a tokenizer, configs, a model card, licences.
_COPIED = re.compile(r"[^.].*\.(json|txt|model|jinja|md)|(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
_MOST_COPIED = 64 << 20


class Dtype(str, Enum):
    """What the weights that stay in high precision are kept in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}


def quantize(
    directory: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A directory of lowbit.save_model or of transformers.")
    ],
    recipe: Annotated[str, typer.Argument(help="A recipe, such as int8, int4-weight-only:group32 or mxfp4.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="Where the result goes; MODEL_DIR-RECIPE by default.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights that are not quantized; auto: as saved, and bf16 where that is fp32.")
    ] = Dtype.auto,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a saved model, without calibration data, and save the result with its tokenizer and configs."""
    chosen = find_recipe(recipe)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    target = target or directory.with_name(f"{directory.name}-{chosen.name.replace(':', '-')}")
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    with errors.status(Text(f"loading {directory}")) as status:
        model = _load(directory)
        already = {layer.recipe.name for layer in quantized_layers(model).values()}
        if already:
            raise ValueError(
                f"{directory} holds a model that is quantized already ({', '.join(sorted(already))}); give the one "
                "that it was made of"
            )
        _cast_(model, dtype)
        status.update(Text(f"quantizing with {chosen.name}"))
        report = quantize_(model, chosen)
        status.update(Text(f"saving to {target}"))
        save_model(model, target)
        _copy_others(directory, target)
    if json:
        print_json(_as_json(report, target))
        return
    out.print(str(report), soft_wrap=True)
    out.print(f"saved in {target}; load it with lowbit.load_model({str(target)!r})", soft_wrap=True)


quantize.__doc__ = f"{quantize.__doc__}\n{EPILOG.format(recipes=', '.join(RECIPES))}"


def _load(directory: Path) -> nn.Module:
    """The model in ``directory``, whoever saved it. Raises: FileNotFoundError, ValueError, ImportError."""
    if our_config(directory) is not None:
        return load_model(directory).eval()
    if is_directory(directory):
        return from_directory(directory)
    raise FileNotFoundError(
        f"{directory} is no saved model: {directory / CONFIG} does not exist, and no config.json of transformers; give "
        "another directory, such as out/demo/model"
    )


def _cast_(model: nn.Module, dtype: Dtype) -> None:
    """Cast the parameters alone: tables in buffers, such as those of rotary embeddings, are computed in fp32."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if dtype is not Dtype.auto:
            parameter.data = parameter.data.to(_DTYPES[dtype])
        elif parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "dtype"):  # transformers' configs say what the weights are in
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _copy_others(directory: Path, target: Path) -> None:
    """Copy what belongs to the model and is no weights."""
    ours = our_config(directory)
    skipped = {CONFIG} if ours is None else {CONFIG, ours[0].name}
    for path in sorted(directory.iterdir()):
        index = path.name.endswith(".index.json")  # of weights in several files
        if _COPIED.fullmatch(path.name) and path.is_file() and path.name not in skipped and not index:
            check_regular(path, _MOST_COPIED)
            shutil.copyfile(path, target / path.name)


def _as_json(report: Any, target: Path) -> dict[str, Any]:
    return {
        "recipe": report.recipe, "converted": report.converted, "skipped": report.skipped, "left": report.left,
        "notes": report.notes, "bytes_before": report.bytes_before, "bytes": report.bytes_after, "out": str(target),
    }  # fmt: skip
