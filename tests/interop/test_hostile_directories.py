"""Damaged and hostile directories of other programs: an error of lowbit with the file's name, and nothing else."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from support.producers import DIRECTORIES, made

import lowbit as lb

pytest.importorskip("transformers", minversion="5")

#: Values that configs do not have.
JUNK = (None, True, -1, 0, 3, 1 << 40, 1.5, "x", "4", [], [1], [128, "a"], {}, {"a": 1}, "\ud800")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {name: made(name, root / name) for name in DIRECTORIES}


def refused(path, told=""):
    """Loading raises one of lowbit's errors, with a file or the directory in its message; or it succeeds."""
    try:
        lb.load_model(path)
    except (ValueError, FileNotFoundError) as error:
        assert path.name in str(error) and told in str(error), error
        return str(error)
    return None


@pytest.mark.parametrize("name", DIRECTORIES)
def test_every_value_of_the_config(name, sources, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sources[name], path)
    config = json.loads((path / "config.json").read_text())
    for key in config["quantization_config"]:
        if key == "quant_method":
            continue
        for value in JUNK:
            changed = {**config, "quantization_config": {**config["quantization_config"], key: value}}
            (path / "config.json").write_text(json.dumps(changed))
            refused(path)
        changed = {k: v for k, v in config["quantization_config"].items() if k != key}
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": changed}))
        refused(path)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_every_tensor(name, sources, tmp_path):
    """Each quantized tensor of one layer is missing, of another shape, of another dtype, or full of other bits."""
    path = tmp_path / "model"
    shutil.copytree(sources[name], path)
    with safe_open(path / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    layer = next(key for key in tensors if key.endswith(DIRECTORIES[name])).removesuffix(DIRECTORIES[name])
    parts = [key for key in tensors if key.startswith(layer) and not key.endswith(".bias")]
    assert len(parts) > 1
    for key in parts:
        value = tensors[key]
        changes = {
            "lacks": None,
            "expected": value.reshape(-1)[:-1].clone() if value.numel() > 1 else value.new_zeros(3),
            "": value.view(torch.uint8).clone() if value.dim() and value.dtype != torch.uint8 else value.long(),
        }
        for told, other in changes.items():
            rest = {k: v for k, v in tensors.items() if k != key}
            save_file(rest if other is None else {**rest, key: other}, path / "model.safetensors")
            message = refused(path)
            if key.endswith(("g_idx", "input_scale")) and message is None:
                continue  # it may be missing
            assert message is not None and (told in message or told == "lacks"), (key, told, message)
        noise = torch.randint(256, (value.nbytes,), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        save_file({**tensors, key: noise.clone()}, path / "model.safetensors")
        refused(path)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(DIRECTORIES)))
def test_cut_and_changed_files(data, name, sources, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "model"
    shutil.copytree(sources[name], path)
    file = path / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 4000) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        refused(path)
    except (AssertionError, SafetensorError) as error:  # a config without its method is not one of these directories
        assert "is not a directory" in str(error) or "model" in str(error)
