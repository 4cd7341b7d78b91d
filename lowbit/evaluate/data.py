"""Evaluation data as batches: windows of a text, sentences, and photographs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.evaluate.tasks import Batch

__all__ = [
    "Wanted",
    "digest",
    "paragraphs",
    "photograph_batches",
    "photographs",
    "read",
    "require",
    "text_batches",
    "windows",
]

#: Tokens per window, and the largest number of tokens per text.
WINDOW, LONGEST = 512, 128

#: Texts per batch.
TEXTS = 8

#: Photographs in packages, by package and folder.
PHOTOGRAPHS: dict[tuple[str, str], tuple[str, ...]] = {
    ("skimage", "data"): (
        "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "coffee.png", "coins.png", "grass.png",
        "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg",
        "rocket.jpg",
    ),
    ("sklearn", "datasets/images"): ("china.jpg", "flower.jpg"),
}  # fmt: skip

#: Number of generated images if no photographs are installed.
GENERATED = 16

#: Side of the square to which a photograph is resized, relative to the side of the crops.
_MARGIN = 256 / 224


class Wanted(NamedTuple):
    """The requested data."""

    text: Path | None = None
    windows: int = 12
    """Most windows of the text."""
    limit: int = 128
    """Most texts or photographs."""
    part: str = "all"
    """``"calibration"`` or ``"held out"`` for disjoint parts of the data, ``"all"`` without calibration."""


# -- text ------------------------------------------------------------------------------------------------------------
def read(path: Path) -> str:
    """The text of a file. Raises ValueError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read ({error.strerror}); give a file of UTF-8 text") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8") from None


def require(wanted: Wanted, model: str) -> Path:
    """The text file for perplexity. Raises ValueError without one."""
    if wanted.text is None:
        raise ValueError(
            f"{model}: perplexity needs a text, and lowbit ships none; pass UTF-8 text that the model was not trained "
            "on with --text FILE (papers usually use wiki.test.raw of WikiText-2)"
        )
    return wanted.text


def windows(tokens: Sequence[int], wanted: Wanted, length: int, origin: str) -> list[Batch]:
    """The first windows of ``length`` tokens, one per batch; all tokens except the first are targets.

    Raises:
        ValueError: There are fewer tokens than one window.
    """
    count = min(len(tokens) // length, wanted.windows)
    if length < 2 or count < 1:
        raise ValueError(
            f"{origin}: {len(tokens)} tokens do not fill one window of {length}; use a longer text with --text"
        )
    cut = torch.tensor(tokens[: count * length]).view(count, 1, length)
    return [Batch(window[:, :-1], window[:, 1:], 1, length - 1) for window in cut]


def paragraphs(wanted: Wanted) -> list[str]:
    """English paragraphs of the user's text, or of the documentation in this Python."""
    from lowbit.demo.text import prose

    if wanted.text is not None:
        paragraphs = [line for part in read(wanted.text).splitlines() for line in prose(part)]
    else:
        from pydoc_data.topics import topics

        paragraphs = [line for _, text in sorted(topics.items()) for line in prose(text)]
    paragraphs = list(dict.fromkeys(paragraphs))
    if not paragraphs:
        raise ValueError(f"{wanted.text}: no paragraph reads as English; use another file with --text")
    start = wanted.limit if wanted.part == "calibration" and wanted.text is None else 0
    return paragraphs[start : start + wanted.limit]


def text_batches(wanted: Wanted, tokenize: Callable[[list[str]], Mapping[str, Tensor]]) -> list[Batch]:
    """Batches of tokenized paragraphs, padded, with at most ``LONGEST`` tokens."""
    texts = paragraphs(wanted)
    parts = [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]
    return [Batch(dict(tokenize(part)), None, len(part), len(part)) for part in parts]


# -- images ----------------------------------------------------------------------------------------------------------
def photographs(limit: int) -> tuple[list[Tensor], str]:
    """Images [3, H, W] in fp32, from 0 to 255, from installed packages or else generated; and their origin."""
    images: list[Tensor] = []
    for (package, folder), names in PHOTOGRAPHS.items():
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            paths = [Path(root) / folder / name for name in names]
            images += [_image(path) for path in paths if path.exists()]
    if images:
        return images[:limit], "scikit-image and scikit-learn"
    return list(generated(min(limit, GENERATED))), "generated images (install scikit-image for photographs)"


def _image(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()


def generated(count: int, side: int = 320) -> Iterator[Tensor]:
    """Noise [3, side, side], from 0 to 255, whose amplitude falls with frequency, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.hypot(torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None, :])
    for _ in range(count):
        spectrum = torch.fft.rfft2(torch.randn(3, side, side, generator=generator)) / (frequency + 1 / side)
        noise = torch.fft.irfft2(spectrum, s=(side, side))
        low, high = noise.amin((1, 2), keepdim=True), noise.amax((1, 2), keepdim=True)
        yield (noise - low) / (high - low) * 255


def photograph_batches(wanted: Wanted, side: int, mean: float, scale: float) -> tuple[list[Batch], str]:
    """Five crops [5, 3, side, side] of each photograph, as ``(x - mean) / scale``, and the photographs' origin."""
    images, origin = photographs(wanted.limit)
    if wanted.part != "all":
        images = images[0 if wanted.part == "calibration" else 1 :: 2]
    return [Batch((crops(image, side) - mean) / scale, None, 1, 5) for image in images], origin


def crops(image: Tensor, side: int) -> Tensor:
    """Corners and center [5, C, side, side] of the resized central square of ``image`` [C, H, W]."""
    square = min(image.shape[1:])
    top, left = ((size - square) // 2 for size in image.shape[1:])
    middle = image[None, :, top : top + square, left : left + square]
    size = round(side * _MARGIN)
    resized = F.interpolate(middle, size=(size, size), mode="bicubic", antialias=True)[0].clamp(0, 255)
    edge, half = size - side, (size - side) // 2
    corners = ((0, 0), (0, edge), (edge, 0), (edge, edge), (half, half))
    return torch.stack([resized[:, y : y + side, x : x + side] for y, x in corners])


def digest(batches: Sequence[Batch]) -> str:
    """SHA-256 of all inputs and targets."""
    hasher = hashlib.sha256()
    for batch in batches:
        for value in _tensors(batch.inputs) + _tensors(batch.targets):
            hasher.update(str((value.dtype, tuple(value.shape))).encode())
            hasher.update(value.contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [value[name] for name in sorted(value)]
    return [value]
