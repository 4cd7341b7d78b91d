"""fuse_layers_: which layers are found, results and gradients close to the plain ones, bytes, and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from torch import Tensor, nn

import lowbit as lb
from lowbit.models.wrap import plain_class, wrapper_of
from lowbit.train.activations import Compressing
from lowbit.train.fused import FusedGate, FusedNorm

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Norm(nn.Module):
    """Written by hand, with eps as a number and a weight of another name."""

    def __init__(self, size: int, offset: int = 0) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.randn(size)), offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (self.offset + self.gain)).to(x.dtype)


class Gated(nn.Module):
    """The names of the code that Meta published, with dropout if asked for."""

    def __init__(self, size: int, hidden: int, dropout: float = 0.0, activation: Any = F.silu) -> None:
        super().__init__()
        self.w2, self.w3, self.w1 = nn.Linear(hidden, size), nn.Linear(size, hidden), nn.Linear(size, hidden)
        self.drop, self.activation = nn.Dropout(dropout), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.drop(self.activation(self.w1(x)) * self.w3(x)))


class Packed(nn.Module):
    """Gate and up in one layer, up first."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(size, 2 * hidden, bias=False), nn.Linear(hidden, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).chunk(2, -1)
        return self.out(up * F.gelu(gate, approximate="tanh"))


def hand_written(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Norm(32), Gated(32, 48, **options), Norm(32, 1), Packed(32, 32), nn.RMSNorm(32, eps=1e-5))


def of_transformers(name: str) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES))
    for parameter in model.parameters():  # weights of norms that are 1, or 0, would hide a wrong offset
        parameter.data += torch.randn_like(parameter) * 0.05
    tokens = torch.randint(3, 64, (2, 9))
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


def gradients(model: nn.Module, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss(model)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "norms", "gates"), [
    ("Llama", 5, 2), ("Gemma", 5, 2), ("Gemma2", 9, 2), ("Phi3", 5, 2), ("Qwen3", 9, 2), ("Mixtral", 5, 0),
])  # fmt: skip
def test_models_of_transformers_are_fused_with_close_gradients(name, norms, gates):
    model, loss = of_transformers(name)
    names, before = set(model.state_dict()), gradients(model, loss)
    lb.train.fuse_layers_(model)
    assert sum(wrapper_of(m, FusedNorm) is not None for m in model.modules()) == norms
    assert sum(wrapper_of(m, FusedGate) is not None for m in model.modules()) == gates
    after = gradients(model, loss)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-6)
    assert after[1].keys() == before[1].keys() and set(model.state_dict()) == names
    for key, grad in before[1].items():
        torch.testing.assert_close(after[1][key], grad, rtol=1e-4, atol=1e-6, msg=key)
    lb.train.unfuse_layers_(model)
    again = gradients(model, loss)
    assert_same_bits(again[0], before[0])
    assert all(torch.equal(again[1][key], grad) for key, grad in before[1].items())


def test_hand_written_layers_are_found_by_what_they_compute():
    model, x = hand_written(), torch.randn(3, 7, 32)
    wanted = gradients(model, lambda model: model(x).square().mean())
    report = lb.train.fuse_layers_(model)
    assert [layer.name for layer in report.layers] == ["0", "1", "2", "3", "4"]
    norms = [wrapper_of(model[i], FusedNorm) for i in (0, 2, 4)]
    assert [(w.weight, w.eps, w.offset) for w in norms] == [("gain", 1e-6, 0), ("gain", 1e-6, 1), ("weight", 1e-5, 0)]
    gates = [wrapper_of(model[i], FusedGate) for i in (1, 3)]
    assert (gates[0].gate, gates[0].up, gates[0].down, gates[0].activation) == ("w1", "w3", "w2", "silu")
    assert (gates[1].gate, gates[1].up, gates[1].up_first, gates[1].activation) == ("both", None, True, "gelu_tanh")
    got = gradients(model, lambda model: model(x).square().mean())
    torch.testing.assert_close(got[0], wanted[0])
    for key, grad in wanted[1].items():
        torch.testing.assert_close(got[1][key], grad, rtol=1e-4, atol=1e-6, msg=key)


class Wide(nn.Module):
    """A norm whose result stays fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (32,), self.weight.float(), 1e-6)


class Residual(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("layer", [
    nn.LayerNorm(32), nn.LayerNorm(32, bias=False), nn.RMSNorm(32), nn.GroupNorm(4, 32), Wide(), Residual(32, 48),
    Gated(32, 48, dropout=0.5), Gated(32, 48, activation=F.gelu), Gated(32, 48, activation=F.relu), nn.PReLU(32),
    nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), nn.Embedding(4, 32), nn.MultiheadAttention(32, 2),
], ids=lambda layer: type(layer).__name__)  # fmt: skip
def test_layers_that_compute_something_else_stay(layer):
    model = nn.Sequential(Norm(32), layer)
    assert [row.name for row in lb.train.fuse_layers_(model).layers] == ["0"]
    with pytest.raises(ValueError, match="expected RMSNorm layers or gated MLPs"):
        lb.train.fuse_layers_(nn.Sequential(layer))


def test_finding_layers_changes_no_state():
    """Random numbers, training mode, buffers and weights; and layers on the meta device are found."""
    model = hand_written().eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    lb.train.fuse_layers_(model)
    assert torch.equal(torch.get_rng_state(), state) and not any(m.training for m in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(lb.train.fuse_layers_(hand_written().to("meta")).layers) == 5


def test_calls_that_the_ops_do_not_serve_run_the_plain_layers():
    model = hand_written().double()
    x = torch.randn(2, 32, dtype=torch.float64)
    wanted = model(x)
    lb.train.fuse_layers_(model)
    assert_same_bits(model(x), wanted)
    norm = nn.Sequential(nn.RMSNorm(32, eps=1e-6)).bfloat16()
    mixed = norm(x.float())
    lb.train.fuse_layers_(norm)
    assert_same_bits(norm(x.float()), mixed)
    assert_same_bits(torch.func.vmap(norm)(x.bfloat16()), torch.func.vmap(nn.Sequential(plain(norm[0])))(x.bfloat16()))


def plain(module: nn.Module) -> nn.Module:
    found = copy.deepcopy(module)
    lb.train.unfuse_layers_(found)
    assert type(found) is plain_class(module)
    return found


def test_copies_stay_fused_and_fusing_twice_is_refused():
    model = hand_written()
    lb.train.fuse_layers_(model)
    assert wrapper_of(copy.deepcopy(model)[0], FusedNorm) is not None
    with pytest.raises(ValueError, match="fused already"):
        lb.train.fuse_layers_(model)
    lb.train.unfuse_layers_(model)
    assert lb.train.unfuse_layers_(model).layers == () and type(model[0]) is Norm


# -- memory ------------------------------------------------------------------------------------------------------------
def llama_block() -> tuple[nn.Module, Tensor]:
    """Two blocks, so that activations of one stay while the other runs; bf16, as models are trained."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 344, "head_dim": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16()
    return model.model, torch.randint(3, 64, (1, 512))


def test_fused_blocks_of_llama_save_less_and_have_a_lower_peak():
    """Of each norm the fp32 copies, of each MLP the activated gate: by the bytes of the tensors."""
    model, tokens = llama_block()

    def step() -> None:
        model(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()

    def measured() -> tuple[int, int]:
        model.zero_grad()
        return lb.memory.saved_bytes(lambda: model(tokens, use_cache=False), model), lb.memory.allocated_peak(step)

    step()
    saved, peak = measured()
    lb.train.fuse_layers_(model)
    step()
    saved_fused, peak_fused = measured()
    gates = 2 * 512 * 344 * 2  # of both blocks, silu(gate) in bf16
    norms = 5 * 512 * 128 * 4  # the normed input of each norm, at least once in fp32
    assert saved - saved_fused >= gates + norms
    assert peak_fused < 0.9 * peak
    lb.train.unfuse_layers_(model)
    assert measured()[0] == saved


def test_the_report_estimates_what_is_saved():
    model, tokens = llama_block()
    report = lb.train.fuse_layers_(model, batch=tokens, loss=lambda out, batch: out.last_hidden_state.float().mean())
    assert report.activations_after < 0.75 * report.activations_before and report.peak_after < report.peak_before


# -- low-bit activations -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["fuse", "compress"])
def test_compressed_activations_save_the_inputs_of_fused_layers_as_codes(first):
    """Gradients are those of the ops at the decoded inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Norm(32), Gated(32, 48))
    calls = [lb.train.fuse_layers_, lb.train.compress_activations_]
    for change in calls if first == "fuse" else calls[::-1]:
        change(model)
    assert wrapper_of(model[1], Compressing) and wrapper_of(model[1], FusedNorm)
    x, grad = torch.randn(4, 5, 32), torch.randn(4, 5, 32)
    y = model(x)
    y.backward(grad)

    def decoded(t: Tensor) -> Tensor:
        return lb.quantize(t.detach(), "mxfp8:ceil").dequantize().requires_grad_()

    norm, mlp = model[1], model[2]
    inner = model[0](x).detach()
    rows = lb.rms_norm(inner, norm.gain.detach(), 1e-6)
    gate, up = (F.linear(rows, w.weight, w.bias).detach() for w in (mlp.w1, mlp.w3))
    assert_same_bits(y.detach(), F.linear(lb.swiglu(gate, up), mlp.w2.weight, mlp.w2.bias).detach())
    gates = decoded(gate), decoded(up)
    grads = torch.autograd.grad(lb.swiglu(*gates), gates, grad @ mlp.w2.weight)
    torch.testing.assert_close(mlp.w1.weight.grad, grads[0].flatten(0, 1).T @ rows.flatten(0, 1))
    into = grads[0] @ mlp.w1.weight + grads[1] @ mlp.w3.weight
    leaf, gain = decoded(inner), norm.gain.detach().requires_grad_()
    wanted = torch.autograd.grad(lb.rms_norm(leaf, gain, 1e-6), (leaf, gain), into)
    torch.testing.assert_close(norm.gain.grad, wanted[1])
    torch.testing.assert_close(model[0].bias.grad, wanted[0].sum((0, 1)))


def test_compressed_fused_layers_save_fewer_bytes_than_either():
    def saved(*changes: Any) -> int:
        model, tokens = llama_block()
        for change in changes:
            change(model)
        return lb.memory.saved_bytes(lambda: model(tokens, use_cache=False), model)

    both = saved(lb.train.fuse_layers_, lb.train.compress_activations_)
    assert both < 0.8 * saved(lb.train.fuse_layers_) and both < 0.95 * saved(lb.train.compress_activations_)


def test_prepared_and_checkpointed_models_are_fused():
    """Layers of a training recipe inside a gated MLP, and recomputed blocks."""
    model, loss = of_transformers("Llama")
    lb.train.prepare_(model, "int8")
    wanted = gradients(copy.deepcopy(model), loss)
    lb.train.fuse_layers_(model)
    assert sum(wrapper_of(m, FusedGate) is not None for m in model.modules()) == 2
    plain_gradients = gradients(copy.deepcopy(model), loss)
    lb.memory.checkpoint_(model)
    got = gradients(model, loss)
    torch.testing.assert_close(got[0], wanted[0], rtol=0.01, atol=0.01)
    assert all(torch.equal(got[1][key], grad) for key, grad in plain_gradients[1].items())
