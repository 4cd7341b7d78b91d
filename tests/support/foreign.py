"""A program that prints what lowbit changes in other libraries: ``python foreign.py ORDER LAYER [FILE]``.

``ORDER``: "after" imports lowbit after the libraries, "before" before them. ``LAYER``: what ``make_layer`` makes then.
It prints two lists of names as JSON: of what differs once lowbit and the libraries are imported, and of what differs
further once there is a layer.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

LIBRARIES = ("transformers", "peft", "trl", "accelerate", "torch")
MODULES = (
    "torch", "accelerate", "transformers", "transformers.modeling_utils", "transformers.masking_utils", "peft",
    "transformers.trainer", "transformers.quantizers.auto", "transformers.generation.utils",
)  # fmt: skip


def load() -> None:
    for name in MODULES:
        importlib.import_module(name)
    try:
        importlib.import_module("trl")
    except ImportError:
        pass


def attributes() -> dict[str, Any]:
    """By name the attributes of all modules and classes of the libraries, and the entries of their tables."""
    found, tables = {}, set()
    for name, value in _attributes():
        found[name] = value
        if type(value) in (dict, list) and id(value) not in tables:
            tables.add(id(value))
            entries = value.items() if type(value) is dict else enumerate(value)
            found.update({f"{name}[{key!r}]": entry for key, entry in list(entries) if isinstance(key, str | int)})
    return found


def _attributes() -> Iterator[tuple[str, Any]]:
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__") or type(value) is types.ModuleType:
                continue
            if not module_name.startswith("torch"):  # in whose own tables lowbit registers its ops and classes
                yield f"{module_name}.{name}", value
            if issubclass(type(value), type) and value.__module__ == module_name:
                for attribute, own in list(vars(value).items()):
                    if type(own) is not int:  # classes count
                        yield f"{module_name}.{name}.{attribute}", own


def of_lowbit(value: Any) -> bool:
    """Whether an object is lowbit's, or a function of its source."""
    if type(value) in (property, classmethod, staticmethod):
        value = value.fget if type(value) is property else value.__func__
    file = value.__code__.co_filename if type(value) is types.FunctionType else ""
    kind = value if issubclass(type(value), type) else type(value)
    return str(kind.__module__).partition(".")[0] == "lowbit" or file.startswith(sys.modules["lowbit"].__path__[0])


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What was replaced, and what was added by lowbit or under its name."""
    return [
        name
        for name, value in now.items()
        if (value is not before[name] if name in before else of_lowbit(value) or name.endswith("['lowbit']"))
    ]


def make_layer(kind: str, file: str) -> Any:
    import torch

    import lowbit as lb

    if kind == "unpickled":
        return torch.load(file, weights_only=False)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    make = {"quantized": lb.quantize_, "trained": lb.train.prepare_, "qat": lb.qat.prepare_}[kind]
    return make(model, "fp8" if kind == "trained" else "int8", skip=())


def main(order: str, kind: str, file: str = "") -> None:
    before: dict[str, Any] = {}
    if order == "after":
        load()
        before = attributes()
        importlib.import_module("lowbit")
    else:
        importlib.import_module("lowbit")
        load()
    imported = attributes()
    if order == "before":
        before = {name: value for name, value in imported.items() if not of_lowbit(value) and "'lowbit'" not in name}
    print(json.dumps(differences(imported, before)))
    make_layer(kind, file)
    print(json.dumps(differences(attributes(), imported)))


if __name__ == "__main__":
    main(*sys.argv[1:])
