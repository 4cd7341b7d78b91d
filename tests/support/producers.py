"""Model directories in the layouts of other programs, written by the programs' published rules."""

import json

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

__all__ = ["DIRECTORIES", "fp8", "gptq", "llama", "made", "nvfp4", "shuffled", "write"]


def llama(dtype=torch.float16):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


def write(directory, model, quantize, config, name="config.json"):
    """Write the model, with ``quantize(name, weight)`` in place of the weights of its blocks' Linears.

    Returns the decoded weights of ``quantize``.
    """
    tensors, exact = {}, {}
    for key, value in model.state_dict().items():
        layer = key.removesuffix(".weight")
        if ".layers." in key and isinstance(model.get_submodule(layer), torch.nn.Linear):
            parts, exact[layer] = quantize(layer, value.float())
            tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[key] = value.contiguous()
    directory.mkdir()
    model.config.dtype, model.config.architectures = model.dtype, [type(model).__name__]
    model.config.save_pretrained(directory)
    described = json.loads((directory / "config.json").read_text())
    if name == "config.json":
        described["quantization_config"] = config
    else:
        (directory / name).write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "model.safetensors")
    return exact


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes ``[count, columns]`` as a stream of bits down each column, in words ``[count * bits / 32, columns]``."""
    lines = (codes[:, None, :] >> np.arange(bits)[None, :, None] & 1).reshape(-1, codes.shape[1])
    words = lines.reshape(-1, 32, codes.shape[1]).astype(np.uint64)
    return (words << np.arange(32, dtype=np.uint64)[None, :, None]).sum(1).astype(np.uint32).view(np.int32)


def gptq(bits, group, symmetric, offset, order=None):
    """Random codes and scales in GPTQ's layout, decoded by the formula of its kernels, scale * (code - zero)."""

    def quantize(name, weight):
        rows, cols = weight.shape
        rng, size = np.random.default_rng(len(name)), cols if group == -1 else group
        codes = rng.integers(0, 1 << bits, (cols, rows))
        count = cols // size
        zeros = np.full((count, rows), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (count, rows))
        scales = (rng.random((count, rows)) / 100).astype(np.float16)
        groups = np.arange(cols) // size if order is None else order(cols, size)
        stored = (zeros - offset) & (1 << bits) - 1
        parts = {
            "qweight": torch.from_numpy(stream(codes, bits)),
            "qzeros": torch.from_numpy(stream(stored.T, bits).T.copy()),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        exact = scales.astype(np.float32)[groups] * (codes - zeros[groups]).astype(np.float32)
        return parts, torch.from_numpy(exact.T.copy())

    return quantize


def shuffled(cols, size):
    """The group of each column, in a random order."""
    return np.random.default_rng(0).permutation(cols) // size


def nvfp4(name, weight):
    """NVFP4 with the global scale amax / (448 * 6), decoded by the table of E2M1."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    second = weight.abs().max() / (448 * 6)
    blocks = weight.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
    unit = scale.float()[..., None] * second
    codes = ((blocks / unit)[..., None] - values).abs().argmin(-1).to(torch.uint8).flatten(1)
    parts = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": second.clone(),
        "input_scale": torch.tensor(0.002),
    }  # fmt: skip
    return parts, (values[codes.long()].unflatten(1, (-1, 16)) * unit).flatten(1)


def fp8(name, weight):
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.clone(), "input_scale": torch.tensor(0.01)}, codes.float() * scale


def awq(group):
    """Random words and scales in AWQ's layout."""

    def quantize(name, weight):
        rows, cols = weight.shape
        torch.manual_seed(len(name))
        words = torch.iinfo(torch.int32)
        parts = {
            "qweight": torch.randint(words.min, words.max, (cols, rows // 8), dtype=torch.int32),
            "qzeros": torch.randint(words.min, words.max, (cols // group, rows // 8), dtype=torch.int32),
            "scales": (torch.rand(cols // group, rows) / 100).half(),
        }
        return parts, weight

    return quantize


def fp8_blocks(name, weight):
    """E4M3 in blocks of 128 x 128 with random scales."""
    scale = torch.rand([-(-size // 128) for size in weight.shape]) / 1000 + 1e-4
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}, weight


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}

#: Layouts: how a weight is quantized, the config, and the end of the name of the tensor that marks a quantized layer.
_LAYOUTS = {
    "gptq": (gptq(4, 32, True, 1), _GPTQ, ".qweight"),
    "gptq in the order of activations": (gptq(4, 32, True, 1, shuffled), {**_GPTQ, "desc_act": True}, ".qweight"),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, ".qweight"),
    "modelopt nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None},
                       ".weight_scale"),
    "modelopt fp8": (fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, ".weight_scale"),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                         "weight_block_size": [128, 128]}, ".weight_scale_inv"),
}  # fmt: skip

#: The end of the name of the tensor that marks a quantized layer, by layout.
DIRECTORIES = {name: row[2] for name, row in _LAYOUTS.items()}


def made(name, directory):
    """Write a directory in a layout and return its path."""
    quantize, config, _ = _LAYOUTS[name]
    write(directory, llama(), quantize, config)
    return directory
