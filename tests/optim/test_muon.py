"""Muon: its momentum and orthogonalization against float64, and torch's Muon beside it."""

from __future__ import annotations

import pytest
import torch

import lowbit as lb
from lowbit.optim.muon import orthogonal

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (64, 64), (1, 5)])
def test_singular_values_go_where_the_polynomial_sends_them(shape):
    """An oracle by the singular values in float64: each step maps s to a s + b s^3 + c s^5."""
    x = torch.randn(shape)
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        a, b, c = COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(
        orthogonal(x, 5, COEFFICIENTS, 1e-7).double(), left @ values.diag() @ right, rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_32_bits_follow_torchs_muon(nesterov, adjust):
    """torch multiplies in bf16, we in fp32 on a CPU: the steps agree to bf16's places."""
    mine = torch.nn.Parameter(torch.randn(96, 64))
    theirs = torch.nn.Parameter(mine.detach().clone())
    options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust}
    a, b = lb.optim.Muon([mine], bits=32, **options), torch.optim.Muon([theirs], **options)
    start = mine.detach().clone()
    for step in range(5):
        mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = mine.grad.clone()
        a.step(), b.step()
    moved = (theirs - start).norm()
    assert (mine - theirs).norm() < 0.02 * moved
    torch.testing.assert_close(a.state[mine]["momentum_buffer"], b.state[theirs]["momentum_buffer"])


def test_vectors_and_groups_of_choice_step_by_adamw():
    matrix, vector, head = (torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 80), (80,), (100, 64)))
    twin = torch.nn.Parameter(head.detach().clone())
    optimizer = lb.optim.Muon([{"params": [matrix, vector]}, {"params": [head], "muon": False}], bits=32)
    adamw = lb.optim.AdamW([twin], bits=32, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    for p in (matrix, vector, head):
        p.grad = torch.randn_like(p)
    twin.grad = head.grad.clone()
    optimizer.step(), adamw.step()
    assert "momentum_buffer" in optimizer.state[matrix]
    assert "exp_avg" in optimizer.state[vector]
    assert torch.equal(head, twin)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_few_bits_stay_near_32(bits):
    """Ten steps on a least-squares problem: the loss is within 5% of that with a momentum of 32 bits."""
    target = torch.randn(64, 96)
    ends = {}
    for width in (32, bits):
        param = torch.nn.Parameter(torch.zeros(64, 96))
        optimizer = lb.optim.Muon([param], lr=0.3, bits=width, weight_decay=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            loss = (param - target).square().mean()
            loss.backward()
            optimizer.step()
        ends[width] = loss.item()
    assert ends[bits] == pytest.approx(ends[32], rel=0.05)


def test_a_convolution_is_a_matrix():
    conv, flat = torch.nn.Parameter(torch.randn(32, 16, 3, 3)), None
    flat = torch.nn.Parameter(conv.detach().reshape(32, 144).clone())
    conv.grad = torch.randn_like(conv)
    flat.grad = conv.grad.reshape(32, 144).clone()
    for param in (conv, flat):
        lb.optim.Muon([param]).step()
    assert torch.equal(conv.detach().reshape(32, 144), flat.detach())


def test_experts_are_matrices_of_their_own():
    stacked = torch.nn.Parameter(torch.randn(3, 40, 70))
    alone = [torch.nn.Parameter(expert.clone()) for expert in stacked.detach()]
    stacked.grad = torch.randn_like(stacked) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    for param, grad in zip(alone, stacked.grad, strict=True):
        param.grad = grad.clone()
    lb.optim.Muon([stacked], bits=32, batch_dims=1).step()
    lb.optim.Muon(alone, bits=32).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in alone]), rtol=1e-4, atol=1e-5)


def test_torchs_state_is_taken_over():
    param = torch.nn.Parameter(torch.randn(64, 80))
    theirs = torch.optim.Muon([param])
    param.grad = torch.randn(64, 80)
    theirs.step()
    optimizer = lb.optim.Muon([param], bits=32)
    optimizer.load_state_dict(theirs.state_dict())
    buffer = theirs.state[param]["momentum_buffer"].clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], buffer.lerp(param.grad, 0.05))


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="None, 'original', 'match_rms_adamw'"):
        lb.optim.Muon([torch.nn.Parameter(torch.ones(3, 4))], adjust_lr_fn="none")
