"""What models are evaluated on: windows of a text, texts, and photographs, as batches."""

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

#: Tokens of a window; of a text, at most.
WINDOW, LONGEST = 512, 128

#: Texts in a batch.
TEXTS = 8

#: Photographs that packages ship, by the folder (package and path) that holds them.
PHOTOGRAPHS: dict[tuple[str, str], tuple[str, ...]] = {
    ("skimage", "data"): (
        "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "coffee.png", "coins.png", "grass.png",
        "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png", "page.png", "retina.jpg",
        "rocket.jpg",
    ),
    ("sklearn", "datasets/images"): ("china.jpg", "flower.jpg"),
}  # fmt: skip

#: How many images stand in for photographs where none are installed.
GENERATED = 16

#: The side of the square that a photograph is resized to, over the side of the crops.
_MARGIN = 256 / 224


class Wanted(NamedTuple):
    """What the user asked for: a text file, how many windows of it, and how many texts or photographs.

    ``part``: of data that has to serve both, ``"calibration"`` is what is calibrated on and ``"held out"`` the rest;
    ``"all"`` where nothing is calibrated.
    """

    text: Path | None = None
    windows: int = 12
    limit: int = 128
    part: str = "all"


# -- text ------------------------------------------------------------------------------------------------------------
def read(path: Path) -> str:
    """The text of a file. Raises: ValueError when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read ({error.strerror}); give a file of UTF-8 text") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8") from None


def require(wanted: Wanted, model: str) -> Path:
    """The text file for perplexity. Raises: ValueError without one, saying which to give."""
    if wanted.text is None:
        raise ValueError(
            f"{model}: perplexity needs a text, and lowbit ships none; give a file of UTF-8 text that the model was "
            "not trained on with --text FILE (figures of papers are usually of WikiText-2's wiki.test.raw)"
        )
    return wanted.text


def windows(tokens: Sequence[int], wanted: Wanted, length: int, origin: str) -> list[Batch]:
    """The first windows of ``length`` tokens, one a batch; all tokens but the first are predicted.

    Raises: ValueError when there are fewer tokens than one window.
    """
    count = min(len(tokens) // length, wanted.windows)
    if length < 2 or count < 1:
        raise ValueError(
            f"{origin}: {len(tokens)} tokens do not fill one window of {length}; give a longer text with --text"
        )
    cut = torch.tensor(tokens[: count * length]).view(count, 1, length)
    return [Batch(window[:, :-1], window[:, 1:], 1, length - 1) for window in cut]


def paragraphs(wanted: Wanted) -> list[str]:
    """Paragraphs of English: of the user's text, or of Python's documentation as this Python ships it."""
    from lowbit.demo.text import prose

    if wanted.text is not None:
        paragraphs = [line for part in read(wanted.text).splitlines() for line in prose(part)]
    else:
        from pydoc_data.topics import topics

        paragraphs = [line for _, text in sorted(topics.items()) for line in prose(text)]
    paragraphs = list(dict.fromkeys(paragraphs))
    if not paragraphs:
        raise ValueError(f"{wanted.text}: no paragraph reads as English; give another file with --text")
    kept = paragraphs[wanted.limit : 2 * wanted.limit] if wanted.text is None else paragraphs[: wanted.limit]
    return kept if wanted.part == "calibration" else paragraphs[: wanted.limit]


def text_batches(wanted: Wanted, tokenize: Callable[[list[str]], Mapping[str, Tensor]]) -> list[Batch]:
    """Paragraphs, several a batch, as the tokenizer makes them (padded, at most ``LONGEST`` tokens)."""
    texts = paragraphs(wanted)
    parts = [texts[start : start + TEXTS] for start in range(0, len(texts), TEXTS)]
    return [Batch(dict(tokenize(part)), None, len(part), len(part)) for part in parts]


# -- images ----------------------------------------------------------------------------------------------------------
def photographs(limit: int) -> tuple[list[Tensor], str]:
    """Images [3, H, W] of 0 to 255 in fp32, and where they are from: installed packages, or a generator."""
    found: list[Tensor] = []
    for (package, folder), names in PHOTOGRAPHS.items():
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec else ():
            paths = [Path(root) / folder / name for name in names]
            found += [_image(path) for path in paths if path.exists()]
    if found:
        return found[:limit], "scikit-image and scikit-learn"
    return list(generated(min(limit, GENERATED))), "generated images (install scikit-image for photographs)"


def _image(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()


def generated(count: int, side: int = 320) -> Iterator[Tensor]:
    """Clouds of color [3, side, side], 0 to 255: noise whose amplitude falls with frequency, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    frequency = torch.hypot(torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)[None, :])
    for _ in range(count):
        spectrum = torch.fft.rfft2(torch.randn(3, side, side, generator=generator)) / (frequency + 1 / side)
        clouds = torch.fft.irfft2(spectrum, s=(side, side))
        low, high = clouds.amin((1, 2), keepdim=True), clouds.amax((1, 2), keepdim=True)
        yield (clouds - low) / (high - low) * 255


def photograph_batches(wanted: Wanted, side: int, mean: float, scale: float) -> tuple[list[Batch], str]:
    """Five crops [5, 3, side, side] of each photograph (the corners and the middle) as ``(x - mean) / scale``."""
    images, origin = photographs(wanted.limit)
    if wanted.part != "all":  # every second one
        images = images[0 if wanted.part == "calibration" else 1 :: 2]
    return [Batch((crops(image, side) - mean) / scale, None, 1, 5) for image in images], origin


def crops(image: Tensor, side: int) -> Tensor:
    """The corners and the middle [5, C, side, side] of the square in the middle of ``image`` [C, H, W], resized."""
    square = min(image.shape[1:])
    top, left = ((size - square) // 2 for size in image.shape[1:])
    middle = image[None, :, top : top + square, left : left + square]
    whole = round(side * _MARGIN)
    resized = F.interpolate(middle, size=(whole, whole), mode="bicubic", antialias=True)[0].clamp(0, 255)
    edge, half = whole - side, (whole - side) // 2
    corners = ((0, 0), (0, edge), (edge, 0), (edge, edge), (half, half))
    return torch.stack([resized[:, y : y + side, x : x + side] for y, x in corners])


def digest(batches: Sequence[Batch]) -> str:
    """SHA-256 of all inputs and targets."""
    total = hashlib.sha256()
    for batch in batches:
        for value in _tensors(batch.inputs) + _tensors(batch.targets):
            total.update(str((value.dtype, tuple(value.shape))).encode())
            total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()


def _tensors(value: Any) -> list[Tensor]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [value[name] for name in sorted(value)]
    return [value]
