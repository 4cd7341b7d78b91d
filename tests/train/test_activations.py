"""Activations kept as codes for backward: gradients at the decoded inputs, bytes, checkpoints, and what stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.variants import threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.checkpointing.segment import Recomputed
from lowbit.demo.gpt import GPT, Block, GPTConfig, rope
from lowbit.memory import checkpoint_
from lowbit.models.wrap import wrapper_of, wrappers
from lowbit.train.activations import FUNCTIONS, Compressing


class Wrapped(nn.Module):
    """A function as a module of its own; ``scale`` makes its input no leaf."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def decoded(x: Tensor, scheme: str = "mxfp8:ceil") -> Tensor:
    return lb.quantize(x, scheme).dequantize()


ONE = {
    "silu": F.silu, "gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh"), "mish": F.mish,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "square": lambda x: x.square(), "pow": lambda x: x**3, "power of itself": lambda x: x * x,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ONE)
def test_gradients_are_those_at_the_decoded_input(name, dtype):
    """The oracle is torch's own gradient of the function at ``decode(encode(x))``."""
    x = torch.randn(5, 7, 45, dtype=dtype, generator=torch.Generator().manual_seed(1))
    grad = torch.randn_like(x)
    module = Wrapped(ONE[name])
    lb.train.compress_activations_(module)
    leaf = x.clone().requires_grad_()
    y = module(leaf * 1)
    y.backward(grad)
    assert_same_bits(y.detach(), ONE[name](x), name)
    there = decoded(x).requires_grad_()
    ONE[name](there).backward(grad)
    assert leaf.grad is not None and there.grad is not None
    assert_same_bits(leaf.grad, there.grad, name)
    assert not torch.equal(there.grad, torch.autograd.grad(ONE[name](leaf), leaf, grad)[0])


def test_swiglu_keeps_each_input_once():
    gate, up = (torch.randn(64, 96).requires_grad_() for _ in range(2))
    module = Wrapped(lambda a, b: F.silu(a * 1) * (b * 1))
    lb.train.compress_activations_(module, "fp8_e4m3:group32")
    y = module(gate, up)
    y.sum().backward()
    kept_gate, kept_up = (decoded(t.detach(), "fp8_e4m3:group32").requires_grad_() for t in (gate, up))
    silu = decoded(F.silu(gate.detach()), "fp8_e4m3:group32")
    assert_same_bits(up.grad, silu, "up")
    F.silu(kept_gate).backward(kept_up.detach())
    assert_same_bits(gate.grad, kept_gate.grad, "gate")


def test_constants_and_parameters_stay_as_they_are():
    """RoPE's products with a table, and a norm's weight."""
    x, table = torch.randn(8, 64).requires_grad_(), torch.randn(8, 64)
    module = Wrapped(lambda a: (a * 1) * table)
    lb.train.compress_activations_(module)
    module(x).sum().backward()
    assert_same_bits(x.grad, table, "the table's numbers")
    norm = nn.RMSNorm(64)
    lb.train.compress_activations_(norm)
    y = norm(x * 1)
    y.backward(torch.ones_like(y))
    want = nn.RMSNorm(64)
    want(decoded(x.detach())).backward(torch.ones_like(y))
    assert_same_bits(norm.weight.grad, want.weight.grad, "weight")


# -- a block -----------------------------------------------------------------------------------------------------------
CONFIG = GPTConfig(layers=2, dim=64, heads=2, hidden=160, context=32)


def block(recipe: str | None, compressed: bool, seed: int = 0) -> Block:
    torch.manual_seed(seed)
    made = Block(CONFIG, 0)
    if recipe:
        lb.train.prepare_(made, recipe)
    if compressed:
        lb.train.compress_activations_(made)
    return made


def test_a_block_keeps_less_than_two_thirds_of_bf16s_bytes():
    x = torch.randn(4, 32, 64)
    cos, sin = rope(torch.arange(32), 32, 10000.0)

    def kept(recipe: str | None, compressed: bool) -> int:
        made = block(recipe, compressed)
        with torch.autocast("cpu", torch.bfloat16):
            return lb.memory.saved_bytes(lambda: made(x.clone().requires_grad_() * 1, cos, sin), made)

    bf16 = kept(None, False)
    assert kept("fp8", True) <= 0.65 * bf16
    assert kept("fp8", True) < kept("fp8", False) < bf16


def gradients(run: Callable[[Block, Tensor], Tensor], recipe: str = "fp8") -> list[Tensor]:
    made = block(recipe, True)
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with threads(1), torch.autocast("cpu", torch.bfloat16):
        y = run(made, x * 1)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in made.parameters())]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "checkpoint_"])
def test_checkpointing_changes_no_bit(how):
    cos, sin = rope(torch.arange(32), 32, 10000.0)

    def recomputed(made: Block, x: Tensor) -> Tensor:
        if how == "checkpoint_":
            checkpoint_(nn.Sequential(made), [made])
            return made(x, cos, sin)
        return checkpoint(made, x, cos, sin, use_reentrant=how == "reentrant")

    plain = gradients(lambda made, x: made(x, cos, sin))
    for index, (got, want) in enumerate(zip(gradients(recomputed), plain, strict=True)):
        assert_same_bits(got, want, f"{how} {index}")


def test_checkpointed_blocks_of_a_model_that_computes_itself_change_no_bit():
    """The model has a Linear of its own, so that it compresses around its checkpointed blocks."""
    tokens = torch.randint(CONFIG.vocab, (2, CONFIG.context), generator=torch.Generator().manual_seed(3))
    found = []
    for checkpointed in (False, True):
        model = GPT(CONFIG)
        lb.train.prepare_(model, "fp8")
        lb.train.compress_activations_(model)
        if checkpointed:
            checkpoint_(model)
        with threads(1), torch.autocast("cpu", torch.bfloat16):
            y = model(tokens)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    for index, (got, want) in enumerate(zip(*found, strict=True)):
        assert_same_bits(got, want, str(index))


def test_an_exception_inside_leaves_nothing_on():
    def raises(x: Tensor) -> Tensor:
        raise RuntimeError("inside")

    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    module = Wrapped(raises)
    lb.train.compress_activations_(module)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="inside"):
            module(torch.randn(4, 32).requires_grad_())
    module.function = interrupted
    with pytest.raises(KeyboardInterrupt):
        module(torch.randn(4, 32).requires_grad_())
    x = torch.randn(4, 32).requires_grad_()
    F.silu(x * 1).sum().backward()
    want = torch.autograd.grad(F.silu(x).sum(), x)[0]
    assert_same_bits(x.grad, want, "outside")


def test_it_can_be_undone_copied_and_refused():
    made = block("fp8", True)
    keys = list(made.state_dict())
    assert keys == list(block("fp8", False).state_dict())
    with pytest.raises(ValueError, match="compressed already"):
        lb.train.compress_activations_(made)
    twin = copy.deepcopy(made)
    assert wrapper_of(twin.norm1, Compressing) is not wrapper_of(made.norm1, Compressing)
    lb.train.uncompress_activations_(made)
    assert not any(wrappers(m) for m in made.modules())
    again = copy.deepcopy(twin)
    checkpoint_(again, [again.mlp])
    lb.train.uncompress_activations_(again)
    assert [type(w) for m in again.modules() for w in wrappers(m)] == [Recomputed], "checkpointing stays"
    twin.mlp.forward = partial(lambda forward, x: forward(x), twin.mlp.forward)
    with pytest.raises(ValueError, match="forward of mlp has been replaced since"):
        lb.train.uncompress_activations_(twin)
    with pytest.raises(ValueError, match="compressed already"):
        lb.train.compress_activations_(twin)
    with pytest.raises(ValueError, match="global scale"):
        lb.train.compress_activations_(made, "nvfp4")
    with pytest.raises(ValueError, match="nothing to compress"):
        lb.train.compress_activations_(nn.Linear(4, 4))


def test_every_function_of_the_table_is_one_that_torch_dispatches():
    overridable = {f for functions in torch.overrides.get_overridable_functions().values() for f in functions}
    others = (F.elu, F.mish, F.softplus, F.hardswish, F.silu, lb.rms_norm, lb.swiglu)
    assert all(f in overridable or f in others for f in FUNCTIONS)


def test_compiled_code_takes_no_part_and_stays_one_graph():
    made = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
    lb.train.compress_activations_(made)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 64).requires_grad_()
    y = compiled(x)
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_checkpointed_blocks_hold_no_codes_under_a_module_with_a_linear():
    """The model is such a module itself: its own ``head`` is a Linear."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(8))
            self.head = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            for each in self.blocks:
                x = checkpoint(each, x, use_reentrant=False)
            return self.head(x)

    def held(model: nn.Module) -> int:
        x = torch.randn(256, 64).requires_grad_()
        return lb.memory.allocated_peak(lambda: model(x))

    plain, made = Headed(), Headed()
    lb.train.compress_activations_(made)
    assert held(made) < held(plain) + 4 * 256 * 64


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_a_checkpoint_recomputes_keeps_its_bits_inside_a_module_with_a_linear(reentrant):
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.b(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate, self.head, self.checkpointed = Gate(), nn.Linear(32, 4), False

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.gate, x, use_reentrant=reentrant) if self.checkpointed else self.gate(x)
            return self.head(y * y)

    def gradient(checkpointed: bool) -> Tensor:
        net = Net()
        lb.train.compress_activations_(net)
        net.checkpointed = checkpointed
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        net(x).sum().backward()
        assert x.grad is not None
        return x.grad

    assert_same_bits(gradient(True), gradient(False), "checkpointed")


def test_a_hook_that_raises_before_it_turns_nothing_off():
    module, x = nn.Sequential(nn.Linear(32, 32), nn.SiLU()), torch.randn(8, 32)
    module[1].register_forward_pre_hook(lambda _, args: 1 / 0 if len(args[0]) == 3 else None)
    lb.train.compress_activations_(module)
    with pytest.raises(ZeroDivisionError):
        module(torch.randn(3, 32))
    assert type(module(x).grad_fn).__name__ == "_FromCodesBackward"
