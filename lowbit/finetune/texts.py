"""Training texts as tokens: text files, JSONL files and files of token ids.

The suffix chooses the kind of a file: a row of ``READERS``, else plain text. Each token of a document has a mark that
says whether the loss includes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lowbit.files import shown

__all__ = ["READERS", "Document", "read", "split"]

#: Of this many documents or tokens, one is held out.
HELD_OUT = 20


class Document(NamedTuple):
    """A document.

    Attributes:
        ids: Token ids ``[n]``, int64.
        trained: For each token whether the loss includes its prediction, bool ``[n]``.
    """

    ids: np.ndarray
    trained: np.ndarray


def read(path: str | Path, tokenizer: Any) -> list[Document]:
    """The documents of a file. Each ends with the tokenizer's end-of-sequence token, except those of token files.

    Args:
        path: UTF-8 text, which is one document; JSONL, with a ``text``, a ``prompt`` and a ``completion``, or
            ``messages`` per line; or token ids: ``.npy`` with one document, or one per row, or ``.bin`` with uint16.
        tokenizer: A tokenizer of transformers. Only ``messages`` need its chat template.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is no such file, or has no token. The message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a text, a .jsonl file or token ids")
    documents = [document for document in READERS.get(path.suffix, _text)(path, tokenizer) if len(document.ids)]
    if not documents:
        raise ValueError(f"{path} has no token to train on")
    most = max(int(document.ids.max()) for document in documents)
    if most >= len(tokenizer):
        raise ValueError(f"{path} has the token {most}, and the tokenizer has {len(tokenizer)}; use the model's tokens")
    return documents


def split(documents: list[Document], length: int) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and documents that are held out: one document in ``HELD_OUT``, or the last tokens.

    Args:
        documents: The documents.
        length: Tokens per row; fewer held-out tokens than a row measure nothing.

    Raises:
        ValueError: The documents have fewer tokens than two rows.
    """
    count = sum(len(document.ids) for document in documents)
    if count < 2 * length:
        raise ValueError(
            f"the text has {count} tokens, fewer than two rows of {length}; use a longer text or --held-out"
        )
    held = documents[HELD_OUT - 1 :: HELD_OUT]
    if sum(len(document.ids) for document in held) >= length:
        return [document for index, document in enumerate(documents) if index % HELD_OUT != HELD_OUT - 1], held
    kept, held, missing = list(documents), [], max(length, count // HELD_OUT)
    while missing > 0:
        last = kept.pop()
        cut = max(0, len(last.ids) - missing)
        first, end = (Document(last.ids[part], last.trained[part]) for part in (slice(cut), slice(cut, None)))
        kept += [first] if cut else []
        held.insert(0, end)
        missing -= len(end.ids)
    return kept, held


# -- kinds of files ----------------------------------------------------------------------------------------------------
def _text(path: Path, tokenizer: Any) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8") from None
    yield _whole(text, tokenizer)


def _lines(path: Path, tokenizer: Any) -> Iterator[Document]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); expected one object per line") from None
            try:
                yield _row(row, tokenizer)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def _row(row: Any, tokenizer: Any) -> Document:
    """The document of a JSON object."""
    for fields, make in _ROWS.items():
        if isinstance(row, dict) and all(field in row for field in fields):
            return make(tokenizer, *(row[field] for field in fields))
    known = "; or ".join(" and ".join(map(repr, fields)) for fields in _ROWS)
    raise ValueError(f"expected an object with {known}, got {shown(row)}")


def _whole(text: Any, tokenizer: Any) -> Document:
    """A text, of which every token is trained on."""
    ids = np.array(_encoded(tokenizer, text) + _end(tokenizer), dtype=np.int64)
    return Document(ids, np.ones(len(ids), dtype=bool))


def _completion(tokenizer: Any, prompt: Any, completion: Any) -> Document:
    """A prompt, and a completion that is trained on."""
    first, second = _encoded(tokenizer, prompt), _encoded(tokenizer, completion) + _end(tokenizer)
    return Document(np.array(first + second, dtype=np.int64), np.arange(len(first) + len(second)) >= len(first))


def _conversation(tokenizer: Any, messages: Any) -> Document:
    """Messages in the chat template of the tokenizer; those of the assistant are trained on."""
    if not isinstance(messages, list) or not all(isinstance(row, dict) and "role" in row for row in messages):
        raise ValueError(f"'messages' must be a list of objects with a 'role', got {shown(messages)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("'messages' need a chat template, which this tokenizer lacks; use 'prompt' and 'completion'")
    ids: list[int] = []
    trained: list[bool] = []
    before = ""
    for index, message in enumerate(messages):
        answer = message["role"] == "assistant"
        if not answer and index + 1 < len(messages) and messages[index + 1]["role"] != "assistant":
            continue
        after = tokenizer.apply_chat_template(
            messages[: index + 1], tokenize=False, add_generation_prompt=not answer and index + 1 < len(messages)
        )
        if not after.startswith(before):
            raise ValueError(
                f"the chat template changes earlier messages after message {index}; use 'prompt' and 'completion'"
            )
        part = _encoded(tokenizer, after[len(before) :])
        ids += part
        trained += [answer] * len(part)
        before = after
    return Document(np.array(ids, dtype=np.int64), np.array(trained, dtype=bool))


def _array(path: Path, tokenizer: Any) -> Iterator[Document]:
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is no array of numpy ({error})") from None
    if rows.ndim not in (1, 2) or rows.dtype.kind not in "iu":
        raise ValueError(f"{path} has {rows.dtype} {list(rows.shape)}; expected integers [n] or [documents, n]")
    for row in np.atleast_2d(rows):
        yield Document(row.astype(np.int64), np.ones(len(row), dtype=bool))


def _bin(path: Path, tokenizer: Any) -> Iterator[Document]:
    if path.stat().st_size % 2:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, which are no tokens of uint16; use .npy")
    ids = np.fromfile(path, dtype="<u2").astype(np.int64)
    yield Document(ids, np.ones(len(ids), dtype=bool))


def _encoded(tokenizer: Any, text: Any) -> list[int]:
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {shown(text)}")
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _end(tokenizer: Any) -> list[int]:
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [end]


#: Fields of a line of JSONL, and its document from the tokenizer and these fields.
_ROWS: dict[tuple[str, ...], Callable[..., Document]] = {
    ("messages",): _conversation,
    ("prompt", "completion"): _completion,
    ("text",): lambda tokenizer, text: _whole(text, tokenizer),
}

#: By suffix: the documents of a file. Other files are text.
READERS: dict[str, Callable[[Path, Any], Iterator[Document]]] = {
    ".jsonl": _lines,
    ".npy": _array,
    ".bin": _bin,
}
