"""The packed layout: a quantized weight as a vector of bytes, in the order in which CPU kernels read it.

``prepack`` converts a ``Quantized`` matrix ``[N, K]``, and ``unpack`` inverts this exactly. The vector begins with a
header of ``HEADER`` bytes: 64-bit words, which ``Word`` names, and the names of the schemes. Codes, scales, zero points
and global scale follow, each aligned to 64 bytes.

Codes of 8 or 4 bits are ``[P, D, 32, 4]`` bytes: P panels of 32 rows, D dwords of depth, and per dword 4 bytes of each
row. With 8 bits, byte ``i`` of dword ``d`` is code ``4d + i``. With 4 bits, its low half is code ``8d + i`` and its
high half code ``8d + 4 + i``, so that the low and the high halves of a dword are two dwords of one-byte codes. The sign
bit of signed integers is flipped, which makes them unsigned with an offset. Scales and zero points are ``[P, B, 32]``,
for B blocks of a row. All that lies past the last row or column is 0. The global scale is as in ``Quantized``.

csrc/ops_matmul.h and csrc/cpu/matmul/packed.h read this layout.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from lowbit.formats import Format
from lowbit.scaling import Scheme, packed_cols, scheme
from lowbit.tensor.quantized import Quantized, scale_dtype, zero_dtype

__all__ = ["HEADER", "Word", "header_of", "input_of", "prepack", "refusal", "shape_of", "unpack"]

#: Bytes of the header; half of them are words, the other half the names of the schemes.
HEADER = 1024
_WORDS = 64
_MAGIC = 0x326B636150626C00
_ALIGN = 64

#: Rows of a panel, and consecutive bytes of a row.
_ROWS, _DWORD = 32, 4

#: Integers with as many bytes as a scale has.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Exchanges within a dword of 4-bit codes, as (shift, mask): the bits of the mask are swapped with the bits ``shift``
#: above. First the two middle bytes, then the two middle halves of each pair; the result is codes 0 4 1 5 2 6 3 7.
_INTERLEAVE = ((8, 0x0000FF00), (4, 0x00F000F0))


class Word(IntEnum):
    """Indices of the header's words; the integers of a scheme (``Scheme.params``) start at ``SCHEME`` and ``INPUT``."""

    MAGIC = 0
    BYTES = 1
    ROWS = 2
    COLS = 3
    CODES = 4  # byte offset of each part
    SCALE = 5
    ZERO_POINT = 6
    GLOBAL_SCALE = 7
    PANEL_BYTES = 8
    HAS_INPUT = 9
    DTYPE = 10  # index in _DTYPES of the dtype before quantization
    SCHEME_NAME = 11  # lengths of the names that follow the words
    INPUT_NAME = 12
    SCHEME = 16
    INPUT = 40


def refusal(weight: Scheme, input: Scheme | None) -> str | None:
    """Why a weight of this scheme cannot be packed, or None."""
    if input is None or {weight.format.kind, input.format.kind} != {"integer"}:
        return "kernels only support the packed layout for integer weights with integer inputs (int8, w4a8)"
    if weight.reference_only:
        return f"the packed layout holds no minima and no superblocks, and {weight} has some"
    if weight.format.bits not in (4, 8):
        return f"the packed layout holds codes of 8 or 4 bits, and {weight.format} has {weight.format.bits}"
    if weight.block[0] != 1:
        return f"each row needs scales of its own in the packed layout, and {weight} shares them between rows"
    return None


def prepack(weight: Quantized, input: Scheme | None) -> Tensor:
    """Packs ``weight [N, K]`` for inputs that are quantized in ``input``, into a new uint8 vector.

    Raises:
        ValueError: The weight cannot be packed (``refusal`` tells why).
    """
    reason = refusal(weight.scheme, input)
    if weight.ndim != 2 or reason is not None:
        raise ValueError(f"prepack: {reason or f'the weight must be a matrix, got shape {list(weight.shape)}'}")
    assert input is not None
    rows, cols = weight.shape
    panels = _to_panels(weight.codes, weight.scheme.format, cols)
    parts = {Word.CODES: panels, Word.SCALE: _blocks_to_panels(weight.scale)}
    if weight.zero_point is not None:
        parts[Word.ZERO_POINT] = _blocks_to_panels(weight.zero_point)
    if weight.global_scale is not None:
        parts[Word.GLOBAL_SCALE] = weight.global_scale
    names = [weight.scheme.name.encode(), input.name.encode()]
    words = [0] * _WORDS
    words[Word.MAGIC], words[Word.ROWS], words[Word.COLS] = _MAGIC, rows, cols
    words[Word.PANEL_BYTES] = panels[0].numel() if rows else 0
    words[Word.HAS_INPUT], words[Word.DTYPE] = 1, _DTYPES.index(weight.dtype)
    words[Word.SCHEME_NAME], words[Word.INPUT_NAME] = map(len, names)
    for begin, params in ((Word.SCHEME, weight.scheme.params()), (Word.INPUT, input.params())):
        words[begin : begin + len(params)] = params
    offset = HEADER
    for word, part in parts.items():
        words[word] = offset
        offset += -(-part.nbytes // _ALIGN) * _ALIGN
    words[Word.BYTES] = offset
    packed = torch.zeros(offset, dtype=torch.uint8, device=weight.device)
    packed[: 8 * _WORDS] = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
    text = b"".join(names)
    packed[8 * _WORDS : 8 * _WORDS + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    for word, part in parts.items():
        packed[words[word] : words[word] + part.nbytes] = part.contiguous().view(-1).view(torch.uint8)
    return packed


def header_of(packed: Tensor) -> list[int]:
    """The words of the header. Raises ValueError if ``packed`` is not a result of ``prepack``."""
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() < HEADER:
        raise ValueError(f"expected a uint8 vector from prepack, got {packed.dtype} {list(packed.shape)}")
    words: list[int] = packed[: 8 * _WORDS].view(torch.int64).tolist()
    if words[Word.MAGIC] != _MAGIC or words[Word.BYTES] != packed.numel():
        raise ValueError(f"expected a packed weight, got {packed.numel()} other bytes; call lowbit.prepack_")
    return words


def shape_of(packed: Tensor) -> tuple[int, int]:
    """``(N, K)`` of the weight."""
    words = header_of(packed)
    return words[Word.ROWS], words[Word.COLS]


def _names(packed: Tensor, words: list[int]) -> tuple[str, str]:
    first, second = words[Word.SCHEME_NAME], words[Word.INPUT_NAME]
    text = bytes(packed[8 * _WORDS : 8 * _WORDS + first + second].tolist()).decode()
    return text[:first], text[first:]


def input_of(packed: Tensor) -> Scheme:
    """The scheme in which inputs of the layer are quantized."""
    return scheme(_names(packed, header_of(packed))[1])


def unpack(packed: Tensor) -> Quantized:
    """Converts a packed weight back to a Quantized with new tensors."""
    words = header_of(packed)
    kind, rows, cols = scheme(_names(packed, words)[0]), words[Word.ROWS], words[Word.COLS]

    def part(word: Word, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return packed[words[word] : words[word] + count].view(dtype).reshape(shape).clone()

    def of_blocks(word: Word, dtype: torch.dtype) -> Tensor:
        across = kind.scale_shape(rows, cols)[1]
        return part(word, (-(-rows // _ROWS), across, _ROWS), dtype).transpose(1, 2).reshape(-1, across)[:rows].clone()

    panels = part(Word.CODES, _panels_shape(rows, cols, kind.format.bits), torch.uint8)
    return Quantized(
        _from_panels(panels, kind.format, rows, cols),
        of_blocks(Word.SCALE, scale_dtype(kind)),
        of_blocks(Word.ZERO_POINT, zero_dtype(kind)) if kind.affine else None,
        part(Word.GLOBAL_SCALE, kind.global_scale_shape(rows, cols), torch.float32) if kind.global_scale else None,
        kind,
        torch.Size((rows, cols)),
        _DTYPES[words[Word.DTYPE]],
    )


# -- codes -------------------------------------------------------------------------------------------------------------
def _panels_shape(rows: int, cols: int, bits: int) -> tuple[int, int, int, int]:
    return -(-rows // _ROWS), -(-cols * bits // (8 * _DWORD)), _ROWS, _DWORD


def _to_panels(codes: Tensor, format: Format, cols: int) -> Tensor:
    """The panels of packed ``codes [N, packed cols]``."""
    rows, row_bytes = codes.shape
    panels, depth, *_ = _panels_shape(rows, cols, format.bits)
    edge = (0, depth * _DWORD - row_bytes, 0, panels * _ROWS - rows)
    padded = torch.nn.functional.pad(_flipped(codes, format, cols).contiguous(), edge)
    dwords = padded.view(panels, _ROWS, depth, _DWORD).view(torch.int32).squeeze(-1)
    if format.bits == 4:
        for shift, mask in _INTERLEAVE:
            dwords = _exchanged(dwords, shift, mask)
    return _transposed(dwords).unsqueeze(-1).view(torch.uint8)


def _from_panels(panels: Tensor, format: Format, rows: int, cols: int) -> Tensor:
    """The inverse of ``_to_panels``; bits past a row's last code are 0."""
    dwords = _transposed(panels.view(torch.int32).squeeze(-1))
    if format.bits == 4:
        for shift, mask in reversed(_INTERLEAVE):
            dwords = _exchanged(dwords, shift, mask)
    padded = dwords.unsqueeze(-1).view(torch.uint8).view(panels.shape[0] * _ROWS, panels.shape[1] * _DWORD)
    return _flipped(padded[:rows, : packed_cols(cols, format.bits)], format, cols)


def _blocks_to_panels(part: Tensor) -> Tensor:
    """Scales or zero points ``[N, B]`` as ``[P, B, 32]``."""
    rows, across = part.shape
    bits = part.view(_BITS[part.element_size()])
    padded = torch.nn.functional.pad(bits, (0, 0, 0, -rows % _ROWS))
    return padded.view(-1, _ROWS, across).transpose(1, 2).contiguous()


def _transposed(dwords: Tensor) -> Tensor:
    """A copy with the last two axes, rows and depth of a panel, exchanged."""
    return dwords.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _flipped(codes: Tensor, format: Format, cols: int) -> Tensor:
    """A copy with flipped sign bits of signed integers and zeros past a row's last code."""
    signs = {8: 0x80, 4: 0x88}[format.bits] if format.kind == "integer" and format.signed else 0
    flipped = codes ^ signs
    if cols * format.bits % 8:
        flipped[:, -1] &= 0x0F
    return flipped


def _exchanged(dwords: Tensor, shift: int, mask: int) -> Tensor:
    moved = (dwords ^ (dwords >> shift)) & mask
    return dwords ^ moved ^ (moved << shift)
