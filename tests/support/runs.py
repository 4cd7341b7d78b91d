"""A tiny run of the demo, for tests."""

from pathlib import Path

from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import TrainConfig, Trainer

ENGLISH = Path(__file__).parents[1] / "data" / "english.txt"
TINY = GPTConfig(vocab=300, context=32, layers=2, heads=2, dim=32, hidden=64)
SHORT = TrainConfig(steps=20, batch=2, context=32, warmup=4, eval_every=5, eval_windows=4, save_every=100)


def made(corpus: Corpus, directory: Path, **changes: object) -> Trainer:
    values = {**vars(SHORT), **changes}
    return Trainer(GPT(TINY, seed=0), corpus, TrainConfig(**values), directory)
