"""Calibrations in files: whatever a file says, loading gives the same calibration or one error that names the file."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=16, hidden=16)
RECIPES = {"*": "uint4-weight-only:group16", "*.qkv": "int8-static-affine", "*.down": "nvfp4"}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("calibration") / "saved"
    lb.calibrate(model(), RECIPES, [torch.arange(16).reshape(2, 8)], ("smoothquant", "gptq")).save(directory)
    return directory


def read(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "calibration.json").read_text())
    return told


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything that a JSON file holds."""
    if path:
        yield path
    rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in rows:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


def used(found: lb.Calibration) -> dict[str, torch.Tensor]:
    made = model()
    lb.quantize_(made, RECIPES, found)
    return made.state_dict()


BAD = (KeyError, None, True, -1, 1.5, "load", "x" * 5000, "../x", "\0", [], [1 << 62, 1 << 62], {}, {"a": None})


@pytest.mark.thinned(4)
@pytest.mark.parametrize("part", range(4))
def test_whatever_the_file_says_it_is_refused_by_name_or_harmless(saved, tmp_path, part):
    told, expected = read(saved), used(lb.Calibration.load(saved))
    shutil.copytree(saved, tmp_path / "run")
    refused = taken = 0
    for path in [*places(told)][part::4]:
        for new in BAD:
            (tmp_path / "run" / "calibration.json").write_text(json.dumps(changed(told, path, new)))
            try:
                found = lb.Calibration.load(tmp_path / "run")
            except (ValueError, FileNotFoundError) as error:
                assert str(tmp_path / "run") in str(error) and len(str(error)) < 1200, (path, new)
                refused += 1
                continue
            taken += 1
            assert isinstance(repr(found) + str(found), str)
            try:
                state = used(found)
            except ValueError:  # of another weight, or of another recipe
                continue
            assert state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in state), (
                path,
                new,
            )
    assert refused > 225 and taken < refused / 5


def test_tensors_of_other_shapes_and_dtypes_are_refused(saved, tmp_path):
    told = read(saved)
    tensors = safetensors.torch.load_file(saved / told["weights"]["file"])
    shutil.copytree(saved, tmp_path / "run")

    def put(tensors: dict[str, torch.Tensor]) -> None:
        data = safetensors.torch.save(tensors)
        (tmp_path / "run" / told["weights"]["file"]).write_bytes(data)
        weights = {**told["weights"], "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        (tmp_path / "run" / "calibration.json").write_text(json.dumps({**told, "weights": weights}))

    put(tensors)
    assert lb.Calibration.load(tmp_path / "run").rows.keys() == set(told["layers"])
    for name, tensor in tensors.items():
        for other in (
            None, tensor.flatten()[:-1].clone(), torch.cat([tensor, tensor]), tensor[None].clone(), tensor.double(),
        ):  # fmt: skip
            put({key: value for key, value in {**tensors, name: other}.items() if value is not None})
            if name.startswith("edit.") and other is not None:
                with pytest.raises(ValueError, match="is not the one that was calibrated"):
                    used(lb.Calibration.load(tmp_path / "run"))
                continue
            with pytest.raises(ValueError, match=rf"{tmp_path}/run/calibration.json is damaged \((Value|Key)Error: "):
                lb.Calibration.load(tmp_path / "run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_of_every_kind_come_back(tmp_path, dtype):
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 30), nn.MultiheadAttention(30, 2))
    layers = layers.to(dtype)
    made = lb.calibrate(layers, "int4-weight-only:group16", None, "search")
    made.save(tmp_path)
    again = lb.Calibration.load(tmp_path)
    assert again.rows == made.rows and len(made.rows) >= 3
    for name, weight in made.weights.items():
        other = again.weights[name]
        assert (weight.shape, weight.dtype, weight.scheme) == (other.shape, other.dtype, other.scheme)
        assert all(torch.equal(part, other.parts[key]) for key, part in weight.parts.items())


LIMITED = """
import resource, sys, torch
import lowbit as lb
model = torch.nn.Sequential(torch.nn.Linear(256, 256))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    lb.calibrate(model, "int8", None, "search", directory=sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs limits on file sizes")
def test_a_write_that_really_fails_names_the_file_and_what_remains(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    said = rf"File too large; finished parts in {tmp_path} are intact: .*: '{tmp_path}/\S*/weights-\w+\.safetensors'\n"
    assert re.search(said, done.stdout), done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.safetensors*"))
