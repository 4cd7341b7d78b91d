"""Layers that a conversion leaves in high precision by default, and the reasons."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowbit.convert.adapters import find
from lowbit.convert.readers import read_layers
from lowbit.convert.select import DEFAULT_SKIP, Protection, Skip, is_table, recipe_for
from lowbit.models import find_input_layers, find_output_layers
from lowbit.models.check import check_model
from lowbit.models.names import matches, patterns_in, plain_name, spells
from lowbit.models.ties import holders
from lowbit.recipes import LayerRecipes

__all__ = ["output_layers_protected", "protections"]

#: The least bits for layers that read raw input, unless the caller names them.
_INPUT_LAYER_BITS = 8

#: Names of trained weights in fine-tuning libraries, as parts of a module's name.
_ADAPTER_WORDS = ("lora_*", "modules_to_save")


def protections(
    model: nn.Module, skip: Skip, recipes: LayerRecipes, unties: bool, trained: bool = False
) -> tuple[Skip, Callable[[str, nn.Module], Protection | None]]:
    """Return the patterns to skip, and a function that gives the Protection of a module, or None.

    Adapters and embeddings are protected always (embeddings without a reason in the report). Layers that read raw input
    are protected from recipes below 8 bits unless ``skip`` is empty. The default ``skip`` protects output layers.

    With ``unties``, output layers tied to an embedding are protected unless ``skip`` is empty. So are layers whose
    weight the model reads itself, even if a pattern names them.

    Args:
        model: The model to convert.
        skip: As for ``quantize_``.
        recipes: The recipes. A pattern that names a module literally overrides its protection.
        unties: Whether the conversion gives each layer a weight of its own.
        trained: Whether weights that the model reads only in training mode count as well.
    """
    check_model(model)
    default = skip is DEFAULT_SKIP
    skip = patterns_in(skip, "skip")
    guards = [_adapters(model), _table]
    if unties:
        guards.insert(1, _read_by_model(model, recipes, trained))
    if unties and skip:
        guards.append(_tied(model))
    if skip:
        guards.append(_raw_input(model, recipes))
    if default:
        skip = ()
        guards.append(output_layers_protected(model, DEFAULT_SKIP))

    def protect(name: str, module: nn.Module) -> Protection | None:
        return next((reason for guard in guards if (reason := guard(name, module)) is not None), None)

    return skip, protect


def _read_by_model(
    model: nn.Module, recipes: LayerRecipes, trained: bool
) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers whose weight the model's code reads; embeddings only if named, as they stay otherwise."""
    readers = read_layers(model, trained)

    def protect(name: str, module: nn.Module) -> Protection | None:
        unnamed_table = is_table(module) and not _spelled(recipes, name)
        if id(module) not in readers or find(module).adapter is None or unnamed_table:
            return None
        return Protection("", f"its model reads its weight itself, in {readers[id(module)]}")

    return protect


def _spelled(recipes: LayerRecipes, name: str) -> bool:
    """Whether a pattern contains the last part of a module's name literally."""
    path = plain_name(name)
    return any(spells(pattern, path, path.rpartition(".")[2]) for pattern, _ in recipes.patterns)


def _table(name: str, module: nn.Module) -> Protection | None:
    return Protection(name.split(".")[-1], "") if is_table(module) and find(module).adapter is not None else None


def output_layers_protected(model: nn.Module, skip: Skip) -> Callable[[str, nn.Module], Protection | None]:
    """With the default ``skip``, protects ``lm_head`` and the layers of ``find_output_layers``.

    The latter are converted if the model has no other layer to convert.
    """
    if skip is not DEFAULT_SKIP:
        return lambda name, module: None
    convertible = [m for m in model.modules() if not is_table(m) and find(m).adapter is not None]
    roles = {id(layer) for layer in find_output_layers(model).values()}
    if all(id(module) in roles for module in convertible):
        roles = set()

    def protect(name: str, module: nn.Module) -> Protection | None:
        word = next((word for word in DEFAULT_SKIP if matches(word, name, module)), None)
        if word is None and id(module) in roles:
            word = name.rpartition(".")[2]
        reason = f"an output layer stays in high precision; skip=() or a recipe for '*{word}' converts it"
        return None if word is None else Protection(word, reason)

    return protect


def _raw_input(model: nn.Module, recipes: LayerRecipes) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers that read raw input, whose few channels carry all information, from low bit widths."""
    readers = {id(layer) for layer in find_input_layers(model)}
    reason = (
        f"it reads raw input, and stays in high precision below {_INPUT_LAYER_BITS} bits; skip=() or a recipe for its "
        f"name converts it"
    )

    def protect(name: str, module: nn.Module) -> Protection | None:
        recipe = recipe_for(recipes, name, module) if id(module) in readers else None
        if recipe is None or recipe.weight.format.bits >= _INPUT_LAYER_BITS:
            return None
        return Protection(name.split(".")[-1], reason)

    return protect


def _tied(model: nn.Module) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers tied to an embedding."""
    tables = {
        parameter: holder.path
        for parameter, sharing in holders(model).items()
        for holder in sharing
        if is_table(holder.module)
    }

    def protect(name: str, module: nn.Module) -> Protection | None:
        shared = [tables[id(p)] for p in module._parameters.values() if p is not None and id(p) in tables]
        if not shared or is_table(module):
            return None
        reason = (
            f"it is tied to the embedding {shared[0]}, which stays in high precision; skip=() or a recipe for its name "
            f"converts a copy"
        )
        return Protection(name.split(".")[-1], reason)

    return protect


def _adapters(model: nn.Module) -> Callable[[str, nn.Module], Protection | None]:
    """Protects adapter weights: ``lora_*``, ``modules_to_save``, and the names listed by peft's classes."""
    inside: dict[str, str] = {}
    for name, module in model.named_modules():
        for part in getattr(type(module), "adapter_layer_names", ()):
            inside[f"{name}.{part}".lstrip(".")] = part

    def protect(name: str, module: nn.Module) -> Protection | None:
        words = name.split(".")
        prefixes = (".".join(words[: i + 1]) for i in range(len(words)))
        listed = (inside[prefix] for prefix in prefixes if prefix in inside)
        spelled = (word for word in words if any(matches(known, word, module) for known in _ADAPTER_WORDS))
        word = next(listed, None) or next(spelled, None)
        if word is None:
            return None
        return Protection(word, f"an adapter stays in high precision for training; a recipe for '*{word}*' converts it")

    return protect
