"""The vocabulary of a tokenizer as metadata of a GGUF file.

Sources: ggml/docs/gguf.md; the pre-tokenizers in src/llama-vocab.cpp of llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CONTROL", "NORMAL", "PRE_TOKENIZERS", "SPACE", "USER_DEFINED", "Vocabulary", "vocabulary"]

#: ``tokenizer.ggml.token_type``.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: The word boundary of SentencePiece, which llama.cpp also expects at the start of WordPiece words.
SPACE = "▁"

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

#: llama.cpp's names of byte-level pre-tokenizers, by their steps in ``tokenizer.json``: the regular expression of a
#: Split, "digits" for a split at every digit, "bytes" for ByteLevel's own expression.
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_ENGLISH + r"|\p{N}{1,3}" + _REST,): "llama-bpe",
    (_ENGLISH + r"|\p{N}" + _REST,): "qwen2",
    (_CASES + "|" + _CAPITALS + r"|\p{N}" + _SLASHES,): "tekken",
    (_CASES + _SUFFIX + "|" + _CAPITALS + _SUFFIX + r"|\p{N}{1,3}" + _SLASHES,): "gpt-4o",
}


#: Pre-tokenizers whose words are tokens before merges are tried, and to which llama.cpp adds BOS by default.
WHOLE_WORDS = ("llama-bpe", "tekken")


class Vocabulary(NamedTuple):
    """The metadata of a vocabulary, by keys after ``tokenizer.``."""

    keys: dict[str, Any]
    """Values for ``ggml.*`` and ``chat_template``; lists of strings, of numbers, or single values."""
    size: int


def vocabulary(tokenizer: Any, size: int, special_ids: dict[str, int] | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer, filled up to ``size`` tokens.

    Added tokens that the model has no row for are left out, as llama.cpp's converter does.

    Args:
        tokenizer: A fast tokenizer of transformers, a ``tokenizers.Tokenizer``, or a directory with ``tokenizer.json``.
        size: Rows of the model's embedding.
        special_ids: The model's special tokens by llama.cpp's names, for tokenizers that have none.

    Raises:
        ValueError: llama.cpp has no such tokenizer, or it has more tokens than the model.
        FileNotFoundError: The directory has no ``tokenizer.json``.
    """
    definition, special = _definition(tokenizer)
    model = definition["model"]
    tokens = dict(_tokens(model))
    added = {row["id"]: row for row in definition.get("added_tokens") or () if row["id"] < size}
    texts = tokens | {number: row["content"] for number, row in added.items()}
    if not texts or max(texts) >= size:
        raise ValueError(f"the tokenizer has token {max(texts, default=None)}, and the model {size} rows of embedding")
    kind, keys = _kind(definition, model)
    types = [_type(number, texts, added, kind) for number in range(size)]
    names = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    if kind == "bert":
        names = [_word_piece(name, code) for name, code in zip(names, types, strict=True)]
    if kind == "llama":
        names = [
            name.replace(SPACE, " ") if code == USER_DEFINED else name for name, code in zip(names, types, strict=True)
        ]
        keys["scores"] = _scores(model, texts, size)
    keys = {"model": kind, **keys, "tokens": names, "token_type": types}
    if kind == "gpt2":
        if not model["merges"]:
            raise ValueError("llama.cpp has no byte-level tokenizer without merges; train one with more tokens")
        keys["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ids = {text: number for number, text in texts.items()}
    roles = (special_ids or {}) | {role: ids[text] for role, text in special.items() if text in ids}
    keys |= {f"{role}_token_id": number for role, number in roles.items()}
    template = getattr(tokenizer, "chat_template", None) or special.get("chat_template")
    result = {f"ggml.{key}": value for key, value in keys.items()}
    if isinstance(template, str):
        result["chat_template"] = template
    return Vocabulary(result, size)


#: llama.cpp's names of special tokens, and the attributes of tokenizers.
ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip


def _definition(tokenizer: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The contents of ``tokenizer.json``, and the texts of special tokens by llama.cpp's names."""
    if isinstance(tokenizer, str | Path):
        return _from_directory(Path(tokenizer))
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise ValueError(
            f"expected a fast tokenizer of transformers, a tokenizers.Tokenizer or a directory with tokenizer.json, "
            f"got a {type(tokenizer).__name__}"
        )
    special = {role: str(getattr(tokenizer, name)) for role, name in ROLES.items() if getattr(tokenizer, name, None)}
    return json.loads(backend.to_str()), special


def _from_directory(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    path = directory / "tokenizer.json" if directory.is_dir() else directory
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a tokenizer, or a directory with tokenizer.json")
    definition = json.loads(path.read_text(encoding="utf-8"))
    settings = path.with_name("tokenizer_config.json")
    config = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    special = {}
    for role, name in ROLES.items():
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[role] = text
    template = path.with_name("chat_template.jinja")
    if template.is_file():
        special["chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(config.get("chat_template"), str):
        special["chat_template"] = config["chat_template"]
    return definition, special


def _tokens(model: dict[str, Any]) -> Iterator[tuple[int, str]]:
    if isinstance(model["vocab"], dict):
        yield from ((number, text) for text, number in model["vocab"].items())
    else:  # Unigram: pairs of text and score
        yield from ((number, text) for number, (text, _) in enumerate(model["vocab"]))


def _kind(definition: dict[str, Any], model: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """llama.cpp's name of the tokenizer, and its settings."""
    if model["type"] == "WordPiece":
        return "bert", {"pre": "default"}
    if model["type"] == "Unigram" or (model["type"] == "BPE" and model.get("byte_fallback")):
        return "llama", {"pre": "default", "add_space_prefix": _adds_space(definition), **_adds(definition)}
    if model["type"] != "BPE":
        raise ValueError(f"llama.cpp has no tokenizer of type {model['type']!r}; expected BPE, Unigram or WordPiece")
    steps = tuple(_steps(definition.get("pre_tokenizer") or {}))
    if steps not in PRE_TOKENIZERS:
        raise ValueError(
            f"llama.cpp's pre-tokenizer for {steps} is not known; add its name to "
            f"lowbit.interop.gguf.PRE_TOKENIZERS, or export without a tokenizer"
        )
    return "gpt2", {"pre": PRE_TOKENIZERS[steps], "add_space_prefix": False, **_adds(definition)}


def _steps(step: dict[str, Any]) -> Iterator[str]:
    """A pre-tokenizer's steps, as in the keys of ``PRE_TOKENIZERS``."""
    kind = step.get("type")
    if kind == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _steps(inner)
    elif kind == "Digits" and step.get("individual_digits"):
        yield "digits"
    elif kind == "Split":
        yield str(step["pattern"].get("Regex", step["pattern"].get("String")))
    elif kind == "ByteLevel":
        if step.get("use_regex", True):
            yield "bytes"
    elif kind is not None:
        yield str(kind)


def _adds(definition: dict[str, Any]) -> dict[str, bool]:
    """Whether the post-processor adds a token at the start, and one at the end."""
    processor = definition.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    rows = [row["single"] for row in steps if row.get("type") == "TemplateProcessing" and row.get("single")]
    return {
        "add_bos_token": any("SpecialToken" in row[0] for row in rows),
        "add_eos_token": any("SpecialToken" in row[-1] for row in rows),
    }


def _adds_space(definition: dict[str, Any]) -> bool:
    """Whether the tokenizer adds a space before the first word."""
    text = json.dumps([definition.get("normalizer"), definition.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _type(number: int, texts: dict[int, str], added: dict[int, dict[str, Any]], kind: str) -> int:
    if number not in texts:
        return UNUSED
    text, row = texts[number], added.get(number)
    if kind == "llama" and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    if kind == "llama" and text == "<unk>":
        return UNKNOWN
    if row is not None:
        return CONTROL if row.get("special") else USER_DEFINED
    return NORMAL


def _word_piece(text: str, code: int) -> str:
    """llama.cpp marks the pieces at the start of a word, and WordPiece those within."""
    if code != NORMAL or (text.startswith("[") and text.endswith("]")):
        return text
    return text[2:] if text.startswith("##") else SPACE + text


def _scores(model: dict[str, Any], texts: dict[int, str], size: int) -> list[float]:
    """SentencePiece's score of each token. Merges that come first have the highest."""
    if isinstance(model["vocab"], list):
        scores = [float(score) for _, score in model["vocab"]]
        return scores + [0.0] * (size - len(scores))
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(parts), rank)
    lowest = -float(len(ranks) + 1)
    return [-float(ranks[texts[n]]) if texts.get(n) in ranks else lowest if n in texts else 0.0 for n in range(size)]
