"""What tells one run of calibration from another: digests that hold in another process, of data, losses and methods."""

from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import METHODS
from lowbit.calibrate.identity import digest
from lowbit.datafree import DATA_FREE

ROOT = Path(lb.__file__).parents[1]
FACTOR = 2.0


@dataclass
class Options:
    """A batch's part without a repr of its own kind of state."""

    scale: float
    names: frozenset[str] = frozenset({"a", "b", "c", "d"})


class Plain:
    """An object whose repr is its address."""

    def __init__(self, value: object) -> None:
        self.value = value


class Loss:
    """An object that is called."""

    def __init__(self, power: int) -> None:
        self.power = power

    @cached_property
    def weights(self) -> Tensor:
        return torch.ones(self.power)

    def __call__(self, output: Tensor, batch: Tensor) -> Tensor:
        return scaled(output).pow(self.power).sum()


def scaled(output: Tensor) -> Tensor:
    return output * FACTOR


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return scaled(F.log_softmax(output, -1)).square().sum()


def powered(power: int):
    return lambda output, batch: output.pow(power).sum()


@lru_cache
def kept(power: int) -> int:
    return power + 1


#: Values that are told from each other, and alike in every process.
VALUES = {
    "object": lambda: Plain(3), "another object": lambda: Plain([torch.ones(2)]),
    "dataclass": lambda: Options(1.0), "another dataclass": lambda: Options(2.0),
    "numbers": lambda: (1, 12), "other numbers": lambda: (11, 2),
    "named": lambda: {"x": 11}, "another named": lambda: {"x1": 1},
    "one and none": lambda: ({"x": 1, "y": 2}, {}), "two": lambda: ({"x": 1}, {"y": 2}),
    "a number's name": lambda: {1: 2}, "a string's": lambda: {"1": 2},
    "set": lambda: {"ab", "cd", "ef"}, "another set": lambda: {"ab", "cd"},
    "array": lambda: np.arange(2000.0),
    "another array": lambda: np.where(np.arange(2000) == 1000, 0, np.arange(2000.0)),
    "function": lambda: loss, "library's": lambda: F.cross_entropy, "another library's": lambda: F.mse_loss,
    "closure": lambda: powered(2), "another closure": lambda: powered(4),
    "partial": lambda: partial(loss, batch=None), "another partial": lambda: partial(loss, batch=1),
    "callable": lambda: Loss(2), "another callable": lambda: Loss(4), "bound": lambda: Loss(2).__call__,
    "builtin": lambda: torch.sum, "another builtin": lambda: torch.prod, "cached": lambda: kept, "class": lambda: Loss,
    "module": lambda: nn.Linear(1, 1, bias=False).requires_grad_(False).apply(lambda one: one.weight.fill_(1)),
}  # fmt: skip


def all_digests() -> list[str]:
    return [digest(make()) for make in VALUES.values()]


@pytest.mark.slow
def test_digests_differ_and_are_the_same_in_another_process():
    told = all_digests()
    assert len(set(told)) == len(VALUES) and told == all_digests()
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    code = f"import {__name__} as here; print(*here.all_digests())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert dict(zip(VALUES, done.stdout.split(), strict=True)) == dict(zip(VALUES, told, strict=True))


def test_the_digest_of_a_weight_is_the_one_that_saved_calibrations_have():
    weight = torch.arange(6.0).reshape(2, 3)
    assert digest(weight.t()) == hashlib.sha256(b"torch.float32 [3, 2]" + weight.t().numpy().tobytes()).hexdigest()
    whole = b"2" + b"torch.float32 [2, 3]" + weight.numpy().tobytes() + b"map 1" + b"2'mask'None"
    assert digest((weight, {"mask": None})) == hashlib.sha256(whole).hexdigest()


def test_a_function_is_told_by_all_that_it_reaches(monkeypatch):
    before = digest(loss)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert digest(loss) != before and digest(Loss(2)) != before
    monkeypatch.undo()
    assert digest(loss) == before

    found = []
    for factor in (1, 2, 1):
        for name, text in {
            "mine": f"FACTOR = {factor}\nOTHER = open('/dev/null')\ndef weigh(y):\n    return FACTOR * y\n",
            "user": "import mine\nimport torch\ndef loss(output, batch):\n    return mine.weigh(torch.sum(output))\n",
        }.items():
            module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(text, vars(module))
        found.append(digest(sys.modules["user"].loss))
    assert found[0] == found[2] != found[1]


def importing(output, batch):
    from support import bits

    return bits.loss(output)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: threading.Lock(), "pickle cannot write a _thread.lock"),
        (lambda: (one for one in ()), "pickle cannot write a builtins.generator"),
        (lambda: partial(loss, batch=threading.Lock()), "pickle cannot write a _thread.lock"),
        (lambda: importing, "it imports support when it is called"),
        (lambda: Plain(sys.modules[__name__]), f"it refers to the module {__name__} as a whole"),
    ],
)
def test_what_has_no_digest_is_named(value, told):
    with pytest.raises(ValueError, match=f"the loss has no digest to identify it: {told}; use plain data, tensors"):
        digest(value(), "the loss")


def cubed(output: Tensor, batch: Tensor) -> Tensor:
    return output.pow(3).sum()


def test_another_loss_or_method_is_another_run(tmp_path):
    model, batches = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), [torch.randn(8, 32)]

    def calibrated(**more: object) -> lb.Calibration:
        return lb.calibrate(model, "int4-weight-only:group32", batches, directory=tmp_path / "run", **more)

    first = calibrated(loss=loss)
    assert calibrated(loss=loss).rows == first.rows
    with pytest.raises(ValueError, match=r"of another run: its loss is '[0-9a-f]+', here it is '[0-9a-f]+'"):
        calibrated(loss=cubed)
    with pytest.raises(ValueError, match=r"of another run: its loss is '[0-9a-f]+', here it is None"):
        calibrated()
    with pytest.raises(ValueError, match="the loss has no digest to identify it: pickle cannot write"):
        lb.calibrate(
            model, "int8", batches, directory=tmp_path / "new", loss=partial(loss, other=threading.Lock())
        )  # fmt: skip
    assert not (tmp_path / "new").exists()

    def solve(weight, scheme, statistics, factor):
        return lb.quantize(weight * factor, scheme)

    mine = [METHODS["search"]._replace(solve=partial(solve, factor=factor)) for factor in (1.0, 0.5)]
    made = lb.calibrate(model, "int8", batches, mine[0], directory=tmp_path / "method")
    assert lb.calibrate(model, "int8", batches, mine[0], directory=tmp_path / "method").rows == made.rows
    for other in (mine[1], "search"):
        with pytest.raises(ValueError, match=r"of another run: its method is 'search minmax [0-9a-f]+', here it is"):
            lb.calibrate(model, "int8", batches, other, directory=tmp_path / "method")

    try:
        for row in mine:  # a name of a third party's table does not say its code
            METHODS.pop("mine", None)
            lb.register_method(row._replace(name="mine"))
            if row is mine[0]:
                lb.calibrate(model, "int8", batches, "mine", directory=tmp_path / "named")
        with pytest.raises(ValueError, match=r"of another run: its method is 'mine minmax [0-9a-f]+', here it is"):
            lb.calibrate(model, "int8", batches, "mine", directory=tmp_path / "named")
    finally:
        METHODS.pop("mine", None), DATA_FREE.pop("mine", None)


@pytest.mark.parametrize("batches", [None, [torch.ones(4, 32)]], ids=["without data", "with data"])
def test_files_of_another_method_are_another_run(tmp_path, batches):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")

    def solve(weight, scheme, statistics, factor):
        return lb.quantize(weight * factor, scheme)

    def files(out: str, factor: float, stop: bool = False) -> None:
        def progress(what: str, done: int, total: int) -> None:
            if stop and (what, done) == ("file", 1):
                raise KeyboardInterrupt

        mine = METHODS["nearest"]._replace(solve=partial(solve, factor=factor))
        lb.quantize_files(
            tmp_path / "plain", "int8", tmp_path / out, mine,
            batches=batches, model=copy.deepcopy(model).to("meta"), shard_bytes=1, progress=progress,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        files("out", 0.5, stop=True)
    with pytest.raises(
        ValueError, match=r"has an interrupted run with method 'nearest minmax [0-9a-f]+', but this run has"
    ):
        files("out", 1.0)
    files("out", 0.5)
    with torch.no_grad():
        for block in model:
            block[0].weight *= 0.5
    lb.quantize_(model, "int8")
    found = lb.load_model(tmp_path / "out", nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))))
    assert all(torch.equal(part, model.state_dict()[name]) for name, part in found.state_dict().items())
