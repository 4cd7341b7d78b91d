"""``lowbit generate``: text from a saved language model, and how fast it comes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.text import Text
from torch import nn

from lowbit.cli.console import errors, out, print_json
from lowbit.cli.models import MODEL, Dtype, cast_, load, load_float, recipe_in
from lowbit.convert import prepack_, quantize_
from lowbit.convert.engine import quantized_layers
from lowbit.interop import tokenizer_of

EPILOG = """
**Examples**

`lowbit generate SmolLM2 "The capital of France is"`

`lowbit generate SmolLM2 "Write a haiku" --recipe int8` — quantized as it is loaded

`lowbit generate SmolLM2-q4_0 --temperature 0.8 --seed 1 < prompt.txt` — sampled, from standard input

`lowbit generate SmolLM2.gguf "def fibonacci(n):" --plain --tokens 60` — the prompt as it is, without the chat template
"""


class _Speed(NamedTuple):
    """Numbers of tokens, and the seconds that they took.

    Attributes:
        prompt: Tokens of the prompt.
        prompt_seconds: From the call to the first new token.
        tokens: New tokens.
        token_seconds: From the first new token to the last.
    """

    prompt: int
    prompt_seconds: float
    tokens: int
    token_seconds: float

    def __str__(self) -> str:
        parts = [f"prompt: {self.prompt} tokens, {self.prompt / self.prompt_seconds:.1f} tokens/s"]
        if self.per_second is not None:
            parts.append(f"generated: {self.tokens} tokens, {self.per_second:.1f} tokens/s")
        return "; ".join(parts)

    @property
    def per_second(self) -> float | None:
        """New tokens per second after the first, or None if there is only one."""
        return (self.tokens - 1) / self.token_seconds if self.tokens > 1 and self.token_seconds > 0 else None


def generate(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; by default standard input.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Quantize the model with this recipe as it is loaded.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampled tokens.")] = 0,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat template.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without the chat template.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of unquantized weights; auto: as in the model.")] = Dtype.auto,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text, and print the tokens per second.

    The chat template is used if the tokenizer has one. Layers that have a packed layout are packed. Text goes to
    standard output, and the speed to standard error.
    """
    chosen = None if recipe is None else recipe_in(recipe, None)
    text = prompt if prompt is not None else sys.stdin.read()
    if not text:
        raise ValueError('there is no prompt; pass it after MODEL: lowbit generate MODEL "Once upon a time"')
    if plain and system is not None:
        raise ValueError("--system is part of the chat template; leave out --plain, or --system")
    with errors.status(Text(f"loading {source}")):
        model: Any
        if chosen is None:
            model = load(source)
            cast_(model, dtype)
        else:
            model, _ = load_float(source, dtype)
        _check(model, source)
        tokenizer = tokenizer_of(source)
        if chosen is not None:
            quantize_(model, chosen)
        if quantized_layers(model) and next(model.parameters()).device.type == "cpu":
            prepack_(model)
    ids = _prompt_ids(tokenizer, text, system, plain)
    streamer = _Printer(tokenizer, silent=json)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature or None}
    if not temperature:
        sampling |= {"top_p": None, "top_k": None}
    try:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=streamer,
                           pad_token_id=_pad(tokenizer, model), **sampling)  # fmt: skip
    except KeyboardInterrupt:
        streamer.end()
    speed = streamer.speed
    if json:
        named = {**speed._asdict(), "tokens_per_second": speed.per_second}
        print_json({"text": "".join(streamer.texts), **named})
        return
    out.print()
    errors.print(str(speed), highlight=False)


def _check(model: nn.Module, source: Path) -> None:
    if not callable(getattr(model, "generate", None)):
        raise ValueError(
            f"{source} holds a {type(model).__name__}, which has no generate(); expected a causal language model of "
            "transformers"
        )


def _prompt_ids(tokenizer: Any, text: str, system: str | None, plain: bool) -> torch.Tensor:
    if plain or getattr(tokenizer, "chat_template", None) is None:
        if system is not None:
            raise ValueError("--system needs a chat template, and the tokenizer has none; put the text into the prompt")
        return tokenizer(text, return_tensors="pt")["input_ids"]  # type: ignore[no-any-return]
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return asked["input_ids"]  # type: ignore[no-any-return]


def _pad(tokenizer: Any, model: Any) -> int | None:
    """The padding token, which transformers asks for even if there is one row; any token will do."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    end = model.generation_config.eos_token_id
    return int(end[0]) if isinstance(end, list) else end  # type: ignore[no-any-return]


class _Printer:
    """A streamer of transformers: prints words as they come, and notes the time of each token.

    Args:
        tokenizer: The tokenizer.
        silent: Whether text is only collected.
    """

    def __init__(self, tokenizer: Any, silent: bool) -> None:
        from transformers import TextStreamer

        self._silent = silent
        self._words = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._words.on_finalized_text = self._take
        self._prompt = 0
        self._started = time.perf_counter()
        self._times: list[float] = []
        #: Pieces of the text.
        self.texts: list[str] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then each new token."""
        if not self._prompt:
            self._prompt, self._started = value.numel(), time.perf_counter()
        else:
            self._times += [time.perf_counter()] * value.numel()
        self._words.put(value)

    def end(self) -> None:
        """Print what is left."""
        self._words.end()

    def _take(self, text: str, stream_end: bool = False) -> None:
        self.texts.append(text)
        if not self._silent:
            sys.stdout.write(text)
            sys.stdout.flush()

    @property
    def speed(self) -> _Speed:
        """Tokens and seconds so far."""
        first = self._times[0] if self._times else time.perf_counter()
        last = self._times[-1] if self._times else first
        return _Speed(self._prompt, first - self._started, len(self._times), last - first)


generate.__doc__ = f"{generate.__doc__}\n{EPILOG}"
