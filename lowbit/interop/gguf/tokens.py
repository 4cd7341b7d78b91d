"""Reads the tokenizer of a GGUF file. The file is untrusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit.files import shown
from lowbit.interop.gguf.header import Header
from lowbit.interop.gguf.vocabulary import CONTROL, NORMAL, PRE_TOKENIZERS, ROLES, SPACE, USER_DEFINED, WHOLE_WORDS

__all__ = ["tokenizer"]


def tokenizer(path: str | Path) -> Any:
    """The tokenizer of a GGUF file, as a fast tokenizer of transformers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The file has no tokenizer, or one that lowbit and transformers do not have, or it is damaged.
    """
    header = Header(Path(path))
    kind, template = (header.values.get(key) for key in ("tokenizer.ggml.model", "tokenizer.chat_template"))
    if kind in (None, "no_vocab"):
        raise ValueError(f"{path} has no tokenizer; give the directory of the original model's tokenizer")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{path} is damaged: tokenizer.chat_template is {shown(template)}; download it again")
    try:
        made = _MAKERS.get(str(kind), _by_transformers)(header)
    except (ImportError, OSError):
        raise
    except Exception as error:  # tokenizers and transformers may raise anything for untrusted values
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path} has no tokenizer that can be read: {str(error)[:200]}") from error
    made.chat_template = template
    return made


def _by_transformers(header: Header) -> Any:
    from transformers import AutoTokenizer

    for key in ("tokens", "scores", "token_type"):
        if f"tokenizer.ggml.{key}" in header.values:
            _listed(header, key, str if key == "tokens" else (int, float))
    return AutoTokenizer.from_pretrained(str(header.path.parent), gguf_file=header.path.name, local_files_only=True)


def _byte_level(header: Header) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    name = header.values.get("tokenizer.ggml.pre")
    steps = next((steps for steps, known in PRE_TOKENIZERS.items() if known == name), None)
    if steps is None:
        raise ValueError(
            f"{header.path} has pre-tokenizer {shown(name)}, expected one of "
            f"{', '.join(PRE_TOKENIZERS.values())}; pass the model's own tokenizer"
        )
    tokens, types = _tokens(header)
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(header, "merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise ValueError(f"{header.path} is damaged: a merge has no two parts; download it again")
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in WHOLE_WORDS))
    made: list[Any] = []
    for step in steps:
        if step == "digits":
            made.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "bytes":
            made.append(pre_tokenizers.Split(Regex(step), "isolated"))
    made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=steps[-1] == "bytes"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(made), decoders.ByteLevel()
    bos = _roles(header, tokens).get("bos_token")
    if header.values.get("tokenizer.ggml.add_bos_token", name in WHOLE_WORDS) and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokens.index(bos))]
        )
    return _fast(header, backend, tokens, types)


def _word_piece(header: Header) -> Any:
    """A tokenizer of BERT. llama.cpp marks the pieces at the start of a word, and WordPiece those within."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    stored, types = _tokens(header)
    tokens = [
        token if code != NORMAL or (token.startswith("[") and token.endswith("]"))
        else token[1:] if token.startswith(SPACE) else f"##{token}"
        for token, code in zip(stored, types, strict=True)
    ]  # fmt: skip
    roles = _roles(header, tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=roles.get("unk_token", "[UNK]")))
    plain = (token for token, code in zip(tokens, types, strict=True) if code == NORMAL and not token.startswith("["))
    backend.normalizer = normalizers.BertNormalizer(lowercase=all(token == token.lower() for token in plain))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    first, last = roles.get("cls_token", roles.get("bos_token")), roles.get("sep_token", roles.get("eos_token"))
    if first is not None and last is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[first, "$A", last], pair=[first, "$A", last, "$B:1", f"{last}:1"],
            special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys((first, last))],
        )  # fmt: skip
    return _fast(header, backend, tokens, types)


#: By llama.cpp's name of the tokenizer; transformers reads all others.
_MAKERS = {"gpt2": _byte_level, "bert": _word_piece}


def _fast(header: Header, backend: Any, tokens: list[str], types: list[int]) -> Any:
    """The fast tokenizer, with special and added tokens."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        backend.add_tokens(
            [AddedToken(token, special=special) for token, code in zip(tokens, types, strict=True) if code == kind]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **_roles(header, tokens))


def _roles(header: Header, tokens: list[str]) -> dict[str, str]:
    """The special tokens by their names in transformers."""
    roles = {}
    for role, name in ROLES.items():
        number = header.values.get(f"tokenizer.ggml.{role}_token_id")
        if number is None:
            continue
        if not isinstance(number, int):
            raise ValueError(
                f"{header.path} is damaged: tokenizer.ggml.{role}_token_id is {shown(number)}; download it again"
            )
        if 0 <= number < len(tokens):
            roles[name] = tokens[number]
    return roles


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens."""
    tokens, types = _listed(header, "tokens", str), _listed(header, "token_type", int)
    if len(types) != len(tokens):
        raise ValueError(
            f"{header.path} is damaged: it has {len(tokens)} tokens and {len(types)} types of tokens; download it again"
        )
    return tokens, types


def _listed(header: Header, key: str, kind: type | tuple[type, ...]) -> list[Any]:
    values = header.values.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{header.path} is damaged: tokenizer.ggml.{key} is {shown(values)}; download it again")
    return values
