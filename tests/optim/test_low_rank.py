"""GaLore and APOLLO against the algorithms of their papers in float64, and every property of states that they add."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit as lb
from lowbit.optim.galore import leading
from lowbit.optim.low_rank import gaussian

LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.99), 1e-8, 0.1
WIDE, TALL, SQUARE = (72, 150), (150, 72), (96, 96)


def gradient(shape: tuple[int, ...], seed: int, fall: float = 0.7) -> Tensor:
    """Matrices whose singular values fall by a factor from one to the next; stacks for three axes."""
    generator = torch.Generator().manual_seed(seed)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    return (left * fall ** torch.arange(left.shape[-1], dtype=torch.float64) @ right).float()


def weight(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(5)))


def stepped(optimizer: torch.optim.Optimizer, param: Tensor, steps: Any, grads: Any = gradient) -> Tensor:
    for step in steps:
        param.grad = grads(tuple(param.shape), step)
        optimizer.step()
    return param.detach()


# -- the papers, in float64 -------------------------------------------------------------------------------------------
class Adam:
    """Adam's direction with bias correction."""

    def __init__(self) -> None:
        self.m, self.v, self.t = 0.0, 0.0, 0

    def __call__(self, r: Tensor) -> Tensor:
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * r
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * r**2
        return (self.m / (1 - BETAS[0] ** self.t)) / ((self.v / (1 - BETAS[1] ** self.t)).sqrt() + EPS)


def int4(p: Tensor) -> Tensor:
    """Groups of 128 elements with the scale amax / 7."""
    groups = p.reshape(-1, 128)
    scale = groups.abs().amax(1, keepdim=True) / 7
    return ((groups / scale).round() * scale).view(p.shape)


def galore(w: Tensor, grads: list[Tensor], rank: int, refresh: int, scale: float, rounded: Any = lambda p: p) -> Tensor:
    """Algorithm 2 of arXiv 2403.03507 with a full SVD; for more rows than columns on the transpose.

    With ``rounded=int4`` the projection is that of arXiv 2407.08296.
    """
    if w.shape[0] > w.shape[1]:
        return galore(w.mT, [g.mT for g in grads], rank, refresh, scale, rounded).mT
    w, adam, p = w.double(), Adam(), None
    for t, g in enumerate(grads):
        if t % refresh == 0:
            new = torch.linalg.svd(g.double()).U[:, :rank]
            p = rounded(new if p is None else new * torch.sign((new * p).sum(0)))
        w = w * (1 - LR * DECAY) - LR * scale * p @ adam(p.mT @ g.double())
    return w


def apollo(w: Tensor, grads: list[Tensor], project: Any, per_tensor: bool, scale: float, growth: float) -> Tensor:
    """Algorithm 1 of arXiv 2412.05270, ``project(t)`` being ``[rows, rank]``; for more rows on the transpose."""
    if w.shape[0] > w.shape[1]:
        return apollo(w.mT, [g.mT for g in grads], project, per_tensor, scale, growth).mT
    w, adam, last = w.double(), Adam(), math.inf
    for t, g in enumerate(grads):
        g = g.double()
        r = project(t).double().mT @ g
        n = adam(r)
        s = n.norm() / r.norm() if per_tensor else n.norm(dim=0) / r.norm(dim=0)
        update = scale * g * s
        update = update * min(1.0, growth * last / update.norm().item())
        last = update.norm().item()
        w = w * (1 - LR * DECAY) - LR * update
    return w


SETTINGS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE])
def test_galore_in_32_bits_is_the_papers(shape):
    """Seven steps with three refreshes. The projection is in fp32 too, so only rounding differs."""
    param = weight(shape)
    start, grads = param.detach().clone(), [gradient(shape, step) for step in range(7)]
    expected = galore(start, grads, 8, 3, 0.25)
    optimizer = lb.optim.GaLore([param], rank=8, refresh=3, projection_bits=32, similarity=None, bits=32, **SETTINGS)
    result = stepped(optimizer, param, range(7))
    moved = (expected - start).norm()
    assert (result - expected).norm() < 1e-4 * moved


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE])
def test_apollo_in_32_bits_is_the_papers(shape, rank):
    """The last gradients are ten times as large, so the limit of growth acts."""
    param, small = weight(shape), min(shape)
    start = param.detach().clone()
    grads = [gradient(shape, step) * (10 if step > 3 else 1) for step in range(7)]

    def project(t: int) -> Tensor:
        return gaussian((small, rank), (3, 0, t // 3), start) / math.sqrt(rank)

    scale = math.sqrt(128) if rank == 1 else 1.0
    expected = apollo(start, grads, project, rank == 1, scale, 1.01)
    unlimited = apollo(start, grads, project, rank == 1, scale, math.inf)
    moved = (expected - start).norm()
    assert (unlimited - expected).norm() > 0.005 * moved
    for growth, end in ((1.01, expected), (None, unlimited)):
        param = weight(shape)
        optimizer = lb.optim.Apollo([param], rank=rank, refresh=3, growth=growth, bits=32, seed=3, **SETTINGS)
        result = stepped(optimizer, param, range(7), lambda shape, step: grads[step])
        assert (result - end).norm() < 1e-4 * moved


@pytest.mark.parametrize(("bits", "most"), [(32, 0.05), (8, 0.08), (4, 0.3)])
@pytest.mark.parametrize("shape", [(96, 256), (256, 96)])
def test_few_bits_stay_near_the_papers(shape, bits, most):
    """How far states of few bits move the sum of twenty steps, with the projection in int4 on both sides.

    AdamW normalizes the small components of the projected gradient too, and those have the largest relative errors.
    """
    grads = [gradient(shape, 0, 0.85) + 0.3 * gradient(shape, step, 0.85) for step in range(20)]
    start = weight(shape).detach().clone()
    exact = {
        "galore": galore(start, grads, 48, 10, 0.25, int4),
        "apollo": apollo(start, grads, lambda t: gaussian((96, 48), (0, 0, 0), start) / 48**0.5, False, 1.0, 1.01),
    }
    optimizers = {
        "galore": lambda p: lb.optim.GaLore([p], rank=48, refresh=10, bits=bits, **SETTINGS),
        "apollo": lambda p: lb.optim.Apollo([p], rank=48, bits=bits, **SETTINGS),
    }
    for name, make in optimizers.items():
        param = weight(shape)
        result = stepped(make(param), param, range(20), lambda shape, step: grads[step])
        error = (result - exact[name]).norm() / (exact[name] - start).norm()
        assert error < most, (name, bits, error)


@pytest.mark.parametrize("shape", [(40, 90), (64, 64), (3, 50, 70)])
def test_leading_vectors_are_those_of_the_svd(shape):
    x = gradient(shape, 1)
    vectors, size = leading(x, 8, (0,))
    exact = torch.linalg.svd(x.double())
    cosines = (vectors.double() * exact.U[..., :8]).sum(-2).abs()
    assert cosines.min() > 1 - 1e-6
    assert size.item() == pytest.approx(exact.S.max().item(), rel=1e-5)
    eye = torch.eye(8).expand(*shape[:-2], 8, 8)
    torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=1e-5)


def test_random_projections_are_gaussian_and_follow_the_key():
    like = torch.ones(1)
    x = gaussian((400, 256), (1, 2, 3), like)
    assert abs(x.mean()) < 0.01 and abs(x.var() - 1) < 0.02
    assert same_bits(x, gaussian((400, 256), (1, 2, 3), like))
    assert not same_bits(x, gaussian((400, 256), (1, 2, 4), like))


# -- which parameters are projected -----------------------------------------------------------------------------------
def test_vectors_small_matrices_and_groups_of_choice_step_by_adamw():
    shapes = {"vector": (5000,), "scalar": (), "narrow": (16, 400), "table": (300, 96)}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    twins = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    for cls in (lb.optim.GaLore, lb.optim.Apollo):
        table = {"params": [params["table"]], "rank": None}
        rest = {"params": [p for name, p in params.items() if name != "table"]}
        optimizer = cls([table, rest], rank=16, **SETTINGS)
        adamw = lb.optim.AdamW([{"params": [twins["table"]]}, {"params": list(twins.values())[:3]}], **SETTINGS)
        for name, param in params.items():
            twins[name].data.copy_(param.detach())
            param.grad = torch.randn(param.shape)
            twins[name].grad = param.grad.clone()
        optimizer.step(), adamw.step()
        for name, param in params.items():
            assert same_bits(param.detach(), twins[name].detach()), name
            assert set(optimizer.state[param]) == set(adamw.state[twins[name]]), name


def test_convolutions_are_matrices_and_experts_stacks_of_them():
    """A stack has the update of each of its matrices; APOLLO's random projections differ from matrix to matrix."""
    conv, flat = weight((64, 8, 5, 5)), weight((64, 200))
    flat.data.copy_(conv.detach().view(64, 200))
    for param in (conv, flat):
        optimizer = lb.optim.GaLore([param], rank=16, **SETTINGS)
        stepped(optimizer, param, range(2), lambda shape, step: gradient((64, 200), step).view(shape))
    assert same_bits(conv.detach().view(64, 200), flat.detach())
    experts = weight((3, 72, 150))
    alone = [nn.Parameter(expert.clone()) for expert in experts.detach()]
    options: dict[str, Any] = {"rank": 8, "refresh": 3, "projection_bits": 32, "bits": 32, "similarity": None}
    scales = torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    stack = lb.optim.GaLore([experts], batch_dims=1, **options, **SETTINGS)
    stepped(stack, experts, range(7), lambda shape, step: gradient(shape, step) * scales)
    for index, param in enumerate(alone):
        start = param.detach().clone()
        optimizer = lb.optim.GaLore([param], **options, **SETTINGS)
        stepped(optimizer, param, range(7), lambda shape, step, i=index: (gradient((3, *shape), step) * scales)[i])
        assert (experts[index] - param).norm() < 1e-3 * (param - start).norm()
    mini = lb.optim.Apollo([experts], rank=1, batch_dims=1, **SETTINGS)
    stepped(mini, experts, range(2))
    assert mini.state[experts]["update_norm"].shape == (3,) and (mini.state[experts]["update_norm"] > 0).all()


# -- the refresh ------------------------------------------------------------------------------------------------------
def refreshes(optimizer: lb.optim.GaLore, param: Tensor, steps: int, grads: Any) -> list[int]:
    """The steps, counted from 1, after which the projection is another one."""
    found, before = [], None
    for step in range(1, steps + 1):
        stepped(optimizer, param, [step], grads)
        now = optimizer.state[param]["projection"].clone()
        if before is None or not torch.equal(now, before):
            found.append(step)
        before = now
    return found


def test_the_interval_doubles_while_the_projections_are_alike():
    """The same matrix with a little noise keeps its singular vectors; independent matrices do not."""
    alike = lambda shape, step: gradient(shape, 0) + 1e-3 * gradient(shape, step)
    param = weight(WIDE)
    optimizer = lb.optim.GaLore([param], lr=0.0, rank=8, refresh=2, patience=2, projection_bits=32)
    assert refreshes(optimizer, param, 30, alike) == [1, 3, 5, 9, 13, 21, 29]
    for similarity, grads in ((0.4, gradient), (None, alike)):
        param = weight(WIDE)
        optimizer = lb.optim.GaLore(
            [param], lr=0.0, rank=8, refresh=2, patience=2, projection_bits=32, similarity=similarity
        )
        assert refreshes(optimizer, param, 12, grads) == [1, 3, 5, 7, 9, 11]


def test_a_gradient_of_zeros_chooses_no_directions():
    param = weight(WIDE)
    optimizer = lb.optim.GaLore([param], rank=8, refresh=100, projection_bits=32)
    zeros = lambda shape, step: torch.zeros(shape) if step < 4 else gradient(shape, step)
    assert refreshes(optimizer, param, 8, zeros)[-1] == 4
    assert optimizer.state[param]["refresh_at"].item() == 104


@pytest.mark.parametrize("cls", [lb.optim.GaLore, lb.optim.Apollo])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_warn_as_with_other_optimizers(cls, value):
    param = weight((96, 256))
    optimizer = cls([("weight", param)], rank=48)
    bad = gradient((96, 256), 0)
    bad[3, 4] = value
    with pytest.warns(UserWarning, match="the gradient of weight is Inf or NaN at step 1"):
        stepped(optimizer, param, [0], lambda shape, step: bad)


# -- states -----------------------------------------------------------------------------------------------------------
def nbytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.dim())


@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512)])
def test_bytes_are_those_of_the_projected_states(shape):
    """By hand: codes of both moments ``128 x 2048``, scales of blocks, the projection ``512 x 128``."""
    moments, projection = 128 * 2048, 512 * 128
    scale = {8: moments // 256 * 4, 4: moments // 128 * 4}
    for bits in (32, 8, 4):
        expected = 2 * (moments * 4 if bits == 32 else moments * bits // 8 + scale[bits])
        for width, stored in ((4, projection // 2 + projection // 128 * 4), (32, projection * 4)):
            param = weight(shape)
            optimizer = lb.optim.GaLore([param], rank=128, bits=bits, projection_bits=width)
            stepped(optimizer, param, [0], lambda shape, step: torch.randn(shape))
            assert nbytes(optimizer.state[param]) == expected + stored
        param = weight(shape)
        optimizer = lb.optim.Apollo([param], rank=128, bits=bits)
        stepped(optimizer, param, [0], lambda shape, step: torch.randn(shape))
        assert nbytes(optimizer.state[param]) == expected + 4
    param = weight(shape)
    optimizer = lb.optim.Apollo([param], rank=1)
    stepped(optimizer, param, [0], lambda shape, step: torch.randn(shape))
    assert nbytes(optimizer.state[param]) == 2 * 2048 * 4 + 4  # few elements: fp32


MAKERS: dict[str, Any] = {
    "galore": lambda params, **options: lb.optim.GaLore(params, rank=48, refresh=3, patience=1, **SETTINGS, **options),
    "apollo": lambda params, **options: lb.optim.Apollo(params, rank=48, refresh=3, **SETTINGS, **options),
    "mini": lambda params, **options: lb.optim.Apollo(params, rank=1, refresh=3, **SETTINGS, **options),
}


@pytest.mark.parametrize("master", [None, "residual"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, master, tmp_path):
    """Interrupted before, at and after a refresh."""
    shape, dtype = (96, 256), torch.bfloat16 if master else torch.float32
    grads = lambda shape, step: gradient(shape, step).to(dtype)
    for end in (2, 3, 4):
        param = nn.Parameter(weight(shape).detach().to(dtype))
        optimizer = MAKERS[name]([param], master=master)
        stepped(optimizer, param, range(end), grads)
        torch.save([param.detach(), optimizer.state_dict()], tmp_path / "state.pt")
        saved, state = torch.load(tmp_path / "state.pt")
        resumed_param = nn.Parameter(saved)
        resumed = MAKERS[name]([resumed_param], master=master)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(state)
        for opt, p in ((optimizer, param), (resumed, resumed_param)):
            stepped(opt, p, range(end, end + 5), grads)
        assert same_bits(param.detach(), resumed_param.detach())
        for key, value in optimizer.state[param].items():
            assert same_bits(value, resumed.state[resumed_param][key]), key


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations([32, 8, 4], 2)])
def test_states_convert_to_other_bits_and_keep_projection_and_schedule(before, after):
    param = weight((96, 256))
    optimizer = MAKERS["galore"]([param], bits=before)
    stepped(optimizer, param, range(4))
    other = nn.Parameter(param.detach().clone())
    converted = MAKERS["galore"]([other], bits=after)
    with pytest.warns(UserWarning, match="are converted to"):
        converted.load_state_dict(optimizer.state_dict())
    mine, theirs = converted.state[other], optimizer.state[param]
    for key in ("step", "projection", "projection_scale", "refresh_at", "interval", "streak"):
        assert same_bits(mine[key], theirs[key]), key
    full = optimizer.torch_state_dict()["state"][0]["exp_avg"]
    assert full.shape == (48, 256)
    error = (converted.torch_state_dict()["state"][0]["exp_avg"] - full).norm() / full.norm()
    assert error < (0.2 if after == 4 else 0.04)


def test_what_fixes_the_shapes_of_states_stays():
    param = weight((96, 256))
    optimizer = lb.optim.GaLore([("weight", param)], rank=16)
    stepped(optimizer, param, [0])
    optimizer.param_groups[0]["rank"] = 8
    with pytest.raises(ValueError, match=r"weight has stepped with \{'rank': 16.*now has \{'rank': 8"):
        optimizer.step()
    other = lb.optim.Apollo([param], rank=16)
    with pytest.raises(ValueError, match=r"expected shape \[16, 256\], but the state has \[96, 256\]"):
        adamw = lb.optim.AdamW([weight((96, 256))])
        stepped(adamw, adamw.param_groups[0]["params"][0], [0])
        other.load_state_dict(adamw.state_dict())


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (lb.optim.GaLore, {"rank": 0}, "rank must be an integer of at least 1, or None, got 0"),
        (lb.optim.GaLore, {"rank": 2.5}, "rank must be an integer"),
        (lb.optim.GaLore, {"refresh": 0}, "refresh must be an integer of at least 1, got 0"),
        (lb.optim.GaLore, {"refresh": None}, "refresh must be an integer of at least 1, got None"),
        (lb.optim.GaLore, {"projection_bits": 2}, "projection_bits must be 32, 8, 4, got 2"),
        (lb.optim.GaLore, {"similarity": math.nan}, "similarity must be a number"),
        (lb.optim.GaLore, {"patience": 0}, "patience must be an integer of at least 1"),
        (lb.optim.Apollo, {"scaling": "row"}, "scaling must be None, 'channel', 'tensor', got 'row'"),
        (lb.optim.Apollo, {"growth": 0.5}, "growth must be a number at least 1"),
        (lb.optim.Apollo, {"scale": -1.0}, "scale must be a number at least 0"),
        (lb.optim.GaLore8bit, {"bits": 4}, r"use GaLore\(\.\.\., bits=4\)"),
    ],
)
def test_settings_that_do_not_fit(cls, options, words):
    with pytest.raises(ValueError, match=words):
        cls([weight((8, 8))], **options)


def test_a_copy_of_the_optimizer_goes_on_alike():
    model = nn.Linear(96, 128)
    optimizer = MAKERS["galore"](model.parameters())
    stepped(optimizer, model.weight, range(3))
    twin_model, twin = copy.deepcopy((model, optimizer))
    for opt, m in ((optimizer, model), (twin, twin_model)):
        stepped(opt, m.weight, range(3, 6))
    assert same_bits(model.weight.detach(), twin_model.weight.detach())


# -- sharding ---------------------------------------------------------------------------------------------------------
#: Rows that processes divide and that they do not, both orientations, a stack, a convolution, a grid of processes.
CASES: list[tuple[tuple[int, ...], list[Any], int]] = [
    ((128, 200), [Shard(0)], 0),
    ((200, 128), [Shard(1)], 0),
    ((131, 250), [Shard(0)], 0),
    ((3, 96, 160), [Shard(0)], 1),
    ((3, 96, 160), [Shard(2)], 1),
    ((98, 12, 3, 3), [Shard(0)], 0),
    ((128, 200), [Replicate()], 0),
]
SHARDED: dict[str, Any] = {
    "galore": lambda p, **o: lb.optim.GaLore(p, rank=64, refresh=2, bits=8, master="stochastic", **SETTINGS, **o),
    "galore 4": lambda p, **o: lb.optim.GaLore(p, rank=64, refresh=2, bits=4, master="residual", **SETTINGS, **o),
    "apollo": lambda p, **o: lb.optim.Apollo(p, rank=64, refresh=2, bits="dynamic8", master="fp32", **SETTINGS, **o),
    "mini": lambda p, **o: lb.optim.Apollo(p, rank=1, refresh=2, bits=8, master="residual", **SETTINGS, **o),
}


def ended(make: Any, place: Any, shape: tuple[int, ...], axes: int) -> tuple[dict[str, Tensor], int]:
    """A parameter and its states, whole, after three steps; and the bytes of states in this process."""
    param = nn.Parameter(place(weight(shape).detach().bfloat16()))
    optimizer = make([param], batch_dims=axes)
    for step in (1, 2, 3):
        param.grad = place(torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16())
        optimizer.step()
    found = {"param": param.detach(), **optimizer.state[param]}
    parts = [v.to_local() if isinstance(v, DTensor) else v for v in optimizer.state[param].values()]
    held = sum(part.nbytes for part in parts)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}, held


def _sharded(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=4)
    line = {size: DeviceMesh("cpu", list(range(size))) for size in (2, 4)}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    for name, make in SHARDED.items():
        alone = {shape: ended(make, lambda x: x, shape, axes) for shape, _, axes in CASES}
        runs = [(line[size], *case) for case in CASES for size in line if rank < size]
        runs.append((grid, (128, 200), [Shard(0), Shard(1)], 0))
        for mesh, shape, placements, axes in runs:
            place = lambda x, m=mesh, p=placements: distribute_tensor(x, m, p)
            made, held = ended(make, place, shape, axes)
            assert made.keys() == alone[shape][0].keys()
            for key, value in made.items():
                assert same_bits(value, alone[shape][0][key]), f"{name} {shape} {placements} on {mesh.size()}: {key}"
            if shape == (128, 200) and mesh is line[4] and placements == [Shard(0)]:
                assert held < 0.3 * alone[shape][1], "states are divided"
    dist.destroy_process_group()


def test_bits_on_several_processes_are_those_of_one(tmp_path: Path):
    run_processes(_sharded, (str(tmp_path),), 4)
