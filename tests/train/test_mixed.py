"""Mixed precision in place: the table against torch's autocast, forwards against torch's, copies, and the way back."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.bits import same_bits
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.models.wrap import plain_class, replaced_forward, wrappers
from lowbit.train import mixed
from lowbit.train.mixed import PARTS, PRECISIONS

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


# -- the table ---------------------------------------------------------------------------------------------------------
class Inputs(NamedTuple):
    """``x`` [4, 6, 8] and images ``image`` [2, 4, 8, 8] in the dtype under test; weights are in fp32."""

    x: Tensor
    image: Tensor
    matrix: Tensor
    ones: Tensor
    labels: Tensor

    def kernel(self, dims: int) -> Tensor:
        return torch.ones(4, 4, *[3] * dims, device=self.x.device)

    def volume(self, dims: int) -> Tensor:
        return self.image.flatten(2) if dims == 1 else self.image if dims == 2 else self.image[:, :, None].repeat(
            1, 1, 3, 1, 1
        )  # fmt: skip

    def attend(self) -> Tensor:
        """torch's attention has weights in fp32, as a model has."""
        layer = nn.MultiheadAttention(8, 2, device=self.x.device)
        return layer(*[self.x.float()] * 3)[0]


OPS = {
    "linear": lambda i: F.linear(i.x, i.matrix, i.ones),
    "matmul": lambda i: i.x @ i.matrix,
    "mm": lambda i: torch.mm(i.x[0], i.matrix),
    "bmm": lambda i: torch.bmm(i.x, i.x.mT),
    "addmm": lambda i: torch.addmm(i.ones, i.x[0], i.matrix),
    "baddbmm": lambda i: torch.baddbmm(i.x @ i.x.mT, i.x, i.x.mT),
    "einsum": lambda i: torch.einsum("abc,dc->abd", i.x, i.matrix),
    **{f"conv{d}d": lambda i, d=d: getattr(F, f"conv{d}d")(i.volume(d), i.kernel(d)) for d in (1, 2, 3)},
    **{
        f"conv_transpose{d}d": lambda i, d=d: getattr(F, f"conv_transpose{d}d")(i.volume(d), i.kernel(d))
        for d in (1, 2, 3)
    },
    "scaled_dot_product_attention": lambda i: F.scaled_dot_product_attention(*[i.x[:, None]] * 3),
    "multi_head_attention": lambda i: i.attend(),
    "layer_norm": lambda i: F.layer_norm(i.x, (8,), i.ones, i.ones),
    "rms_norm": lambda i: F.rms_norm(i.x, (8,), i.ones),
    "group_norm": lambda i: F.group_norm(i.image, 2, i.ones[:4], i.ones[:4]),
    "softmax": lambda i: i.x.softmax(-1),
    "log_softmax": lambda i: i.x.log_softmax(-1),
    "cross_entropy": lambda i: F.cross_entropy(i.x[0], i.labels),
    "nll_loss": lambda i: F.nll_loss(i.x[0], i.labels),
    "mse_loss": lambda i: F.mse_loss(i.x, i.x + 1),
    "l1_loss": lambda i: F.l1_loss(i.x, i.x.float()),
    "smooth_l1_loss": lambda i: F.smooth_l1_loss(i.x, i.x + 1),
    "huber_loss": lambda i: F.huber_loss(i.x, i.x.float()),
    "kl_div": lambda i: F.kl_div(i.x, i.x.float().abs(), reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda i: F.binary_cross_entropy_with_logits(i.x, i.x.float().sigmoid()),
    "embedding": lambda i: F.embedding(i.labels, i.x[0]),
    "residual_sum": lambda i: i.matrix[:6] + i.x,
    "gelu": lambda i: F.gelu(i.x),
    "silu": lambda i: F.silu(i.x),
    "relu": lambda i: F.relu(i.x),
    "dropout": lambda i: F.dropout(i.x),
    "batch_norm": lambda i: nn.BatchNorm2d(4, device=i.x.device)(i.image),
}


def test_every_op_of_the_table_is_run():
    named = [op for part in PARTS for op in part.ops]
    assert sorted(named) == sorted(OPS) and len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("part", "op"), [(part, op) for part in PARTS for op in part.ops], ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_table_says_what_autocast_does(part, op, precision, device):
    short = PRECISIONS[precision]
    words = {"16 bits": short, "fp32": torch.float32}
    of_short = part.on_cuda if device == "cuda" and part.on_cuda else part.of_short
    for given, expected in ((torch.float32, part.of_fp32), (short, of_short)):
        torch.manual_seed(0)
        x, image = torch.randn(4, 6, 8, device=device), torch.randn(2, 4, 8, 8, device=device)
        matrix, ones = torch.randn(8, 8, device=device), torch.ones(8, device=device)
        inputs = Inputs(x.to(given), image.to(given), matrix, ones, torch.arange(6, device=device))
        with torch.autocast(device, short):
            found = OPS[op](inputs)
        assert found.dtype is words[expected], (op, given)


@pytest.mark.parametrize("copies", [False, True], ids=["autocast", "copies"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_table_says_what_weights_gradients_and_optimizers_are_kept_in(precision, copies):
    model = Model()
    lb.train.mixed_(model, precision, working_copies=copies, fp32_gradients=False if copies else None)
    optimizer = lb.optim.AdamW(model.parameters(), bits=32, master="fp32")
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    matrix = model.up.weight
    held = {
        "weights": [matrix],
        "gradients of weights": [matrix.grad],
        "optimizer": [t for state in optimizer.state.values() for t in state.values()],
    }
    words = {"16 bits": PRECISIONS[precision], "fp32": torch.float32}
    parts = {part.name: words[part.of_short if copies else part.of_fp32] for part in PARTS if not part.ops}
    assert {name: {t.dtype for t in tensors} for name, tensors in held.items()} == {n: {d} for n, d in parts.items()}
    assert ("master" in optimizer.state[matrix]) == copies and model.norm.weight.dtype is torch.float32


# -- the forward -------------------------------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor] | Tensor:
        """``x`` [rows, 8] -> [rows, 4]."""
        y = self.up(x)
        self.seen.append(y.dtype)
        return self.down(self.norm(y.float())) * scale


def test_the_forward_is_that_of_torchs_autocast_with_its_result_in_fp32():
    for precision, dtype in PRECISIONS.items():
        model, same, x = Model(), Model(), torch.randn(3, 8)
        names = list(model.state_dict())
        report = lb.train.mixed_(model, precision)
        assert report.converted == ("up", "down") and report.bytes_before == report.bytes_after
        with torch.autocast("cpu", dtype):
            expected = same(x, scale=2.0)
        found = model(x, scale=2.0)
        assert expected.dtype is dtype and same_bits(found, expected.float()) and model.seen == [dtype]
        found.sum().backward()
        expected.float().sum().backward()
        assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), same.parameters(), strict=True))
        assert list(model.state_dict()) == names
        assert inspect.signature(model.forward) == inspect.signature(same.forward)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_inside_leaves_no_autocast_behind(error):
    class Fails(nn.Linear):
        def forward(self, x):
            raise error

    model = Fails(2, 2)
    lb.train.mixed_(model)
    with pytest.raises(error):
        model(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu") and (torch.ones(1, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_results_in_containers_are_widened_and_others_left_alone():
    class Many(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "count": 3, "rest": (y.argmax(-1), [y.double(), None])}

    model = Many(2, 2)
    lb.train.mixed_(model)
    found = model(torch.ones(1, 2))
    assert found["y"].dtype is torch.float32 and found["count"] == 3
    assert found["rest"][0].dtype is torch.int64 and found["rest"][1][0].dtype is torch.float64


def test_caches_keep_their_dtype_though_an_exporter_has_registered_them_as_containers():
    class Cache:
        def __init__(self, keys) -> None:
            self.keys = keys

        def get_seq_length(self) -> int:
            return len(self.keys)

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            return y, Cache(y)

    register_pytree_node(Cache, lambda cache: ([cache.keys], None), lambda parts, _: Cache(*parts))
    model = Cached()
    lb.train.mixed_(model, "bf16")
    out, cache = model(torch.randn(2, 4))
    assert out.dtype == torch.float32 and cache.keys.dtype == torch.bfloat16


@dataclass(frozen=True)
class Output:
    y: Tensor
    rest: Any
    more: int = field(default=1, init=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_results_in_dataclasses_are_widened(compiled):
    class Gives(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return Output(y, [Output(y, None), x])

    torch._dynamo.reset()
    model, x = Gives(2, 2), torch.ones(1, 2)
    lb.train.mixed_(model)
    found = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(x)
    assert (found.y.dtype, found.rest[0].y.dtype, found.more) == (torch.float32, torch.float32, 1)
    assert found.rest[0].rest is None and torch.equal(found.rest[1], x)


def test_a_dataclass_without_floats_of_16_bits_comes_back_itself():
    class Gives(nn.Linear):
        def forward(self, x):
            return given

    given, model = Output(torch.ones(2), "text"), Gives(2, 2)
    lb.train.mixed_(model)
    assert model(torch.ones(1, 2)) is given


def test_copies_and_pickles_run_their_own_weights():
    model, x = Model(), torch.randn(3, 8)
    lb.train.mixed_(model, "bf16")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(twin(x), model(x))
        nn.init.zeros_(twin.down.weight)
        assert not torch.equal(twin(x), model(x))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_compiled(copies, dynamic):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    lb.train.mixed_(model, "bf16", working_copies=copies, fp32_gradients=copies)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5) if dynamic else (3,):
        x = torch.randn(rows, 8)
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        model.zero_grad()
        y = compiled(x)
        y.sum().backward()
        assert y.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
        for p, g in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g.to(p.grad.dtype))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_keep_their_bits(reentrant):
    class Blocks(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
            self.recompute = recompute

        def forward(self, x):
            for block in self.blocks:
                x = x + (checkpoint(block, x, use_reentrant=reentrant) if self.recompute else block(x))
            return x

    grads = []
    for recompute in (False, True):
        model = Blocks(recompute)
        lb.train.mixed_(model)
        torch.manual_seed(1)
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(same_bits, *grads))


@pytest.mark.parametrize("order", ["mixed first", "prepared first"])
def test_prepared_layers_answer_in_its_dtype(order):
    model = Model()
    calls = [lambda: lb.train.mixed_(model, "bf16"), lambda: lb.train.prepare_(model, "fp8", skip=())]
    for call in calls if order == "mixed first" else reversed(calls):
        call()
    model(torch.randn(3, 8)).sum().backward()
    assert model.seen == [torch.bfloat16] and model.up.weight.grad.dtype is torch.float32
    lb.train.unmixed_(model)
    model(torch.randn(3, 8))
    assert model.seen[1] is torch.float32


def test_a_model_that_is_one_layer():
    layer = nn.Linear(8, 4)
    lb.train.mixed_(layer)
    lb.train.prepare_(layer, "fp8", skip=())
    assert plain_class(layer) is lb.train.TrainLinear and layer(torch.randn(3, 8)).dtype is torch.float32
    lb.train.convert_(layer)
    lb.train.unmixed_(layer)
    assert type(layer) is nn.Linear and not wrappers(layer)


def test_transformers_finds_the_arguments_of_the_forward():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )
    lb.train.mixed_(model)
    rows = torch.randint(64, (2, 8))
    out = model(input_ids=rows, labels=rows)
    assert out.logits.dtype is out.loss.dtype is torch.float32
    assert "labels" in inspect.signature(model.forward).parameters


# -- working copies ----------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.attention, self.conv, self.norm = nn.MultiheadAttention(8, 2), nn.Conv1d(8, 8, 1), nn.RMSNorm(8)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(*[self.norm(x)] * 3, need_weights=False)[0]
        return self.head(self.norm(x + self.mix(x) + self.conv(x.mT).mT))


def test_matrices_are_stored_in_16_bits_and_the_rest_in_fp32():
    model, same, tokens = Tied(), Tied(), torch.randint(12, (3, 5))
    report = lb.train.mixed_(model, "bf16", working_copies=True)
    short = {name for name, p in model.named_parameters() if p.dtype is torch.bfloat16}
    assert short == {"mix.weight", "attention.in_proj_weight", "attention.out_proj.weight", "conv.weight"}
    assert report.left == {"head": "its weight is shared with Embedding, and stays as it is"}
    assert report.bytes_before - report.bytes_after == 2 * sum(model.get_parameter(name).numel() for name in short)
    plain = lb.train.mixed_(same, "bf16")
    assert plain.converted == ("mix", "head", "attention", "attention.out_proj", "conv") and plain.left == {}
    assert same_bits(model(tokens), same(tokens)), "products see the numbers that autocast makes"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: lb.train.LossScaler, count: int = 40) -> float:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x[:, :4].tanh()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def test_an_optimizer_made_after_the_way_back_takes_the_state_of_the_one_before():
    model = Model()
    lb.train.mixed_(model, "bf16", working_copies=True)
    before = lb.optim.AdamW(model.parameters(), lr=1e-3, bits=32, master="fp32")
    steps(model, before, lb.train.LossScaler(enabled=False), 3)
    masters = [before.state[p].get("master", p).detach().clone() for p in model.parameters()]
    lb.train.unmixed_(model, before)
    assert all(same_bits(p.detach(), m) for p, m in zip(model.parameters(), masters, strict=True))
    after = lb.optim.AdamW(model.parameters(), lr=1e-3, bits=32)
    with pytest.warns(UserWarning, match=r"master weights \(fp32\) are dropped"):
        after.load_state_dict(before.state_dict())
    steps(model, after, lb.train.LossScaler(enabled=False), 1)
    assert {int(state["step"]) for state in after.state.values()} == {4}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_working_copies_with_masters_train_as_fp32_weights_do(precision):
    """Small steps, which copies alone would not show: their masters hold what autocast's weights do."""
    ends = {}
    for copies in (False, True):
        model = Model()
        with torch.no_grad():
            for p in model.parameters():  # numbers that are the same in 16 bits, so both begin alike
                p.copy_(p.to(PRECISIONS[precision]))
        lb.train.mixed_(model, precision, working_copies=copies, fp32_gradients=True if copies else None)
        optimizer = lb.optim.AdamW(model.parameters(), lr=1e-5, bits=32, master="fp32")
        steps(model, optimizer, lb.train.LossScaler(enabled=precision == "fp16"))
        if copies:
            lb.train.unmixed_(model, optimizer)
        ends[copies] = [p.detach() for p in model.parameters()]
    assert all(map(same_bits, ends[False], ends[True]))


def test_gradients_of_copies_accumulate_in_fp32_where_asked():
    """bf16 loses a small gradient that is added to a large one."""
    for wide, expected in ((True, 257.0), (False, 256.0)):
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        report = lb.train.mixed_(model, "bf16", working_copies=True, fp32_gradients=wide)
        for x in (256.0, 1.0):
            model(torch.full((1, 1), x)).sum().backward()
        assert report.converted == ("0",) and model[0].weight.grad.item() == expected
        assert model[0].weight.grad.dtype is (torch.float32 if wide else torch.bfloat16)


def test_fp32_gradients_hold_for_copies_of_the_model_and_after_it_moves():
    model = nn.Sequential(nn.Linear(8, 8))
    lb.train.mixed_(model, "fp16", working_copies=True)
    for one in (copy.deepcopy(model), model.float().half()):
        one(torch.randn(2, 8)).sum().backward()
        assert one[0].weight.grad.dtype is torch.float32


def test_a_model_in_bf16_may_accumulate_in_fp32():
    model = nn.Linear(4, 4).bfloat16()
    lb.train.mixed_(model, fp32_gradients=True)
    model(torch.randn(2, 4)).sum().backward()
    assert model.weight.grad.dtype is model.bias.grad.dtype is torch.float32
    lb.train.unmixed_(model)
    assert model.weight.grad is None and model.weight.grad_dtype is torch.bfloat16


def test_the_way_back():
    model, x = Model(), torch.randn(3, 8)
    before = copy.deepcopy(model.state_dict())
    lb.train.mixed_(model, "bf16", working_copies=True)
    report = lb.train.unmixed_(model)
    assert type(model) is Model and not wrappers(model) and report.converted == ("up", "down")
    assert model(x).dtype is torch.float32 and model.seen == [torch.float32]
    for name, value in model.state_dict().items():
        if name in ("up.weight", "down.weight"):
            assert bool(((value - before[name]).abs() <= 2.0**-15 * before[name].abs()).all()), "24 bits are kept"
        else:
            assert same_bits(value, before[name])
    lb.train.mixed_(model, "fp16")
    lb.train.unmixed_(model)


def test_a_forward_of_the_models_own_comes_back():
    model = Model()
    model.forward = own = lambda x: model.up(x) * 2
    lb.train.mixed_(model)
    assert model(torch.ones(1, 8)).dtype is torch.float32 and replaced_forward(model) is own
    lb.train.unmixed_(model)
    assert model.forward is own


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused_and_changes_nothing():
    def refused(match: str, model: nn.Module, *args: object, error: type = ValueError, **options: object) -> None:
        with pytest.raises(error, match=match):
            lb.train.mixed_(model, *args, **options)

    model = Model()
    refused("precision must be one of bf16, fp16, got 'fp8'", model, "fp8")
    refused("the model must be an nn.Module, got list", [], error=TypeError)
    refused("fp32_gradients is for parameters in 16 bits", model, fp32_gradients=True)
    refused("fp32 matrices of Linear.* for working_copies", nn.LayerNorm(4), working_copies=True)
    refused("run a forward first if its layers are lazy", nn.LazyLinear(4), working_copies=True)
    refused("got a compiled one; call mixed_ before torch.compile", torch.compile(Model(), backend="eager"))
    model(torch.randn(3, 8)).sum().backward()
    refused("up.weight has a gradient in fp32; call optimizer.zero_grad", model, working_copies=True)
    model.zero_grad()
    with torch.no_grad():
        model.down.weight[0, 0] = 1e6
    refused(r"down.weight has values beyond the largest of torch.float16, 65504; use 'bf16'", model, "fp16",
            working_copies=True)  # fmt: skip
    assert not wrappers(model) and all(p.dtype is torch.float32 for p in model.parameters())
    with pytest.raises(ValueError, match=r"expected a model that lowbit.train.mixed_ changed"):
        lb.train.unmixed_(model)
    lb.train.mixed_(model, "bf16", working_copies=True)
    refused(r"computes in mixed bf16 already; call lowbit.train.unmixed_\(model\) first", model, "bf16")
    with pytest.raises(ValueError, match=r"the optimizer has no master of up.weight; give one of lowbit.optim"):
        lb.train.unmixed_(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.up.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(("has", "told"), [(True, 0), (False, 1)])
@pytest.mark.filterwarnings("default")
def test_a_processor_without_the_instructions_is_told(monkeypatch, recwarn, has, told):
    monkeypatch.setattr(mixed, "multiplies", lambda precision: has)
    report = lb.train.mixed_(Model(), "fp16")
    assert len(recwarn) == told and all("no instructions that multiply fp16" in str(w.message) for w in recwarn)
    assert len(report.notes) == 1 + told


@pytest.mark.parametrize("settings", [{}, {"proj_size": 8}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lstms_run_on_any_processor(monkeypatch, precision, settings):
    """Without instructions for 16 bits oneDNN has no LSTM under autocast; elsewhere this takes the same way."""
    monkeypatch.setattr(mixed, "multiplies", lambda precision: False)
    torch.manual_seed(0)
    model, x = torch.nn.LSTM(16, 32, batch_first=True, **settings), torch.randn(4, 6, 16)
    plain = torch.autograd.grad(model(x)[0].square().mean(), list(model.parameters()))
    with pytest.warns(UserWarning, match="no instructions that multiply"):
        lb.train.mixed_(model, precision)
    y, _ = model(x)
    assert y.dtype == torch.float32 and torch.backends.mkldnn.enabled
    for got, want in zip(torch.autograd.grad(y.square().mean(), list(model.parameters())), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.01 * float(want.abs().max()))
