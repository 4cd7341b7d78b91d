"""What a conversion leaves as it is unless a pattern of the recipes names it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowbit.convert.adapters import find
from lowbit.convert.readers import read_layers
from lowbit.convert.select import DEFAULT_SKIP, Protection, Skip, is_table, recipe_for
from lowbit.models import find_input_layers
from lowbit.models.check import check_model
from lowbit.models.names import matches, patterns_in, plain_name, spells
from lowbit.models.ties import holders
from lowbit.recipes import LayerRecipes

__all__ = ["protections"]

#: Layers that read raw input take a recipe of so many bits or more, unless the caller says otherwise.
_STEM_BITS = 8

#: Parts of a module's name by which fine-tuning libraries call the weights that they train.
_ADAPTER_WORDS = ("lora_*", "modules_to_save")


def protections(
    model: nn.Module, skip: Skip, plan: LayerRecipes, unties: bool, trained: bool = False
) -> tuple[Skip, Callable[[str, nn.Module], Protection | None]]:
    """The names to skip, and what stays unless a pattern of ``plan`` spells it.

    Always protected: adapters, and embeddings, of which reports say nothing. Unless ``skip`` is empty, also layers that
    read raw input, from recipes of less than 8 bits. Where a conversion ``unties``, which gives a layer a weight of its
    own, so are output layers tied to an embedding, unless ``skip`` is empty, and layers whose weight the model reads
    itself (where it is ``trained``, in training mode as well), even where a pattern names them. The default ``skip`` is
    a protection too: a pattern may name ``lm_head``, and the report gives the reason.
    """
    check_model(model)
    default = skip is DEFAULT_SKIP
    skip = patterns_in(skip, "skip")
    guards = [_adapters(model), _table]
    if unties:
        guards.insert(1, _read_by_model(model, plan, trained))
    if unties and skip:
        guards.append(_tied(model))
    if skip:
        guards.append(_raw_input(model, plan))
    if default:
        skip = ()
        guards.append(_output_layer)

    def protect(name: str, module: nn.Module) -> Protection | None:
        return next((found for guard in guards if (found := guard(name, module)) is not None), None)

    return skip, protect


def _read_by_model(
    model: nn.Module, plan: LayerRecipes, trained: bool
) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers whose weight code of the model reads itself; of embeddings, which stay anyway, named ones."""
    readers = read_layers(model, trained)

    def protect(name: str, module: nn.Module) -> Protection | None:
        unnamed_table = is_table(module) and not _spelled(plan, name)
        if id(module) not in readers or find(module).adapter is None or unnamed_table:
            return None
        return Protection("", f"its model reads its weight itself, in {readers[id(module)]}")

    return protect


def _spelled(plan: LayerRecipes, name: str) -> bool:
    """Whether a pattern of ``plan`` spells the last part of a module's name."""
    path = plain_name(name)
    return any(spells(pattern, path, path.rpartition(".")[2]) for pattern, _ in plan.patterns)


def _table(name: str, module: nn.Module) -> Protection | None:
    return Protection(name.split(".")[-1], "") if is_table(module) and find(module).adapter is not None else None


def _output_layer(name: str, module: nn.Module) -> Protection | None:
    word = next((word for word in DEFAULT_SKIP if matches(word, name, module)), None)
    reason = f"an output layer stays in high precision; skip=(), or a recipe for '*{word}', converts it"
    return None if word is None else Protection(word, reason)


def _raw_input(model: nn.Module, plan: LayerRecipes) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers that read raw input, whose few channels carry all that the model sees, from few bits."""
    readers = {id(layer) for layer in find_input_layers(model)}
    reason = (
        f"it reads raw input, and stays in high precision below {_STEM_BITS} bits; skip=(), or a recipe for its name, "
        f"converts it"
    )

    def protect(name: str, module: nn.Module) -> Protection | None:
        recipe = recipe_for(plan, name, module) if id(module) in readers else None
        if recipe is None or recipe.weight.format.bits >= _STEM_BITS:
            return None
        return Protection(name.split(".")[-1], reason)

    return protect


def _tied(model: nn.Module) -> Callable[[str, nn.Module], Protection | None]:
    """Protects layers whose weight is an embedding's."""
    tables = {
        parameter: holder.path
        for parameter, several in holders(model).items()
        for holder in several
        if is_table(holder.module)
    }

    def protect(name: str, module: nn.Module) -> Protection | None:
        shared = [tables[id(p)] for p in module._parameters.values() if p is not None and id(p) in tables]
        if not shared or is_table(module):
            return None
        reason = (
            f"its weight is that of the embedding {shared[0]}, which stays in high precision; skip=(), or a recipe for "
            f"its name, converts a copy"
        )
        return Protection(name.split(".")[-1], reason)

    return protect


def _adapters(model: nn.Module) -> Callable[[str, nn.Module], Protection | None]:
    """Protects the weights that a wrapper trains: ``lora_*``, ``modules_to_save``, and what peft's classes list."""
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
        return Protection(
            word, f"an adapter stays in high precision, to be trained; a recipe for '*{word}*' converts it"
        )

    return protect
