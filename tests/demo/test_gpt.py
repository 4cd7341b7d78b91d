"""The GPT against an independent fp64 computation, its cache, its initialisation and its sampling."""

import math

import pytest
import torch

from lowbit.demo.gpt import GPT, GPTConfig, KVCache, generate, rope, rotate

SMALL = GPTConfig(vocab=50, context=32, layers=2, heads=2, dim=16, hidden=24)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(SMALL.vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def oracle(model: GPT, sequence: list[int]) -> list[list[float]]:
    """Logits of one sequence in plain fp64 Python-style arithmetic: one query at a time, RoPE as complex rotation."""
    w = {name: value.double() for name, value in model.state_dict().items()}
    config = model.config
    width = config.dim // config.heads

    def norm(x, gain):
        return x / (x.pow(2).mean() + 1e-6).sqrt() * gain

    def turn(x, position):
        half = torch.complex(x[: width // 2], x[width // 2 :])
        angles = torch.tensor(
            [position * config.rope_base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64
        )
        half = half * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((half.real, half.imag))

    xs = [w["embed.weight"][t] for t in sequence]
    for layer in range(config.layers):
        p = f"blocks.{layer}."
        keys, values, after = [], [], []
        for position, x in enumerate(xs):
            qkv = w[p + "attention.qkv.weight"] @ norm(x, w[p + "norm1.weight"])
            q, k, v = (part.view(config.heads, width) for part in qkv.split(config.dim))
            keys.append(torch.stack([turn(head, position) for head in k]))
            values.append(v)
            heads = []
            for h in range(config.heads):
                scores = torch.stack([turn(q[h], position) @ key[h] / math.sqrt(width) for key in keys]).softmax(0)
                heads.append(sum(s * value[h] for s, value in zip(scores, values, strict=True)))
            after.append(x + w[p + "attention.out.weight"] @ torch.cat(heads))
        xs = []
        for x in after:
            gate, up = (w[p + "mlp.gate_up.weight"] @ norm(x, w[p + "norm2.weight"])).chunk(2)
            xs.append(x + w[p + "mlp.down.weight"] @ (gate * torch.sigmoid(gate) * up))
    return torch.stack([w["lm_head.weight"] @ norm(x, w["norm.weight"]) for x in xs])


def test_logits_equal_an_independent_fp64_computation():
    model = GPT(SMALL, seed=3)
    x = tokens(1, 20)
    got, expected = model(x)[0].double(), oracle(model, x[0].tolist())
    # Two blocks of a few dot products of at most 24 terms each: a hundred roundings of fp32 at most.
    assert (got - expected).abs().max() <= 100 * 2**-24 * expected.abs().max()


def test_rope_keeps_lengths_and_sees_only_distance():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).double()

    def score(i: int, j: int) -> float:
        turned = [rotate(x.float(), *rope(torch.tensor([p]), 16, 10000.0)).double() for x, p in ((q, i), (k, j))]
        assert torch.allclose(turned[0].norm(), q.norm(), rtol=1e-6)
        return float((turned[0] * turned[1]).sum())

    # fp32 angles of up to 40 radians are off by 40 * 2^-24 each.
    assert abs(score(7, 3) - score(40, 36)) < 1e-5 * float(q.norm() * k.norm())
    assert abs(score(7, 3) - score(3, 7)) > 1e-2


def test_no_position_sees_a_later_one():
    model = GPT(SMALL)
    x = tokens(2, 16)
    changed = x.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % SMALL.vocab
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("pieces", [(16,), (1,) * 16, (5, 1, 7, 3)], ids=str)
def test_cached_logits_equal_those_of_the_whole(pieces):
    model = GPT(SMALL)
    x = tokens(2, 16)
    cache = KVCache(SMALL, 2, dtype=torch.float32)
    with torch.no_grad():
        parts = torch.cat([model(part, cache) for part in x.split(list(pieces), dim=1)], dim=1)
    whole = model(x)
    assert cache.length == 16
    assert (parts - whole).abs().max() <= 100 * 2**-24 * whole.abs().max()


def test_weights_follow_from_the_seed_alone():
    state = torch.get_rng_state()
    first = GPT(SMALL, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state), "building a model must leave the caller's generator alone"
    torch.rand(5)
    again, other = GPT(SMALL, seed=1).state_dict(), GPT(SMALL, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_generate_is_greedy_at_temperature_zero_and_repeatable_otherwise():
    model, prompt = GPT(SMALL), tokens(3, 4)
    greedy = torch.stack(list(generate(model, prompt, 8, temperature=0)), dim=1)
    x = prompt
    for _ in range(8):
        x = torch.cat((x, model(x)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(greedy, x[:, 4:])
    assert torch.equal(torch.stack(list(generate(model, prompt, 8, top_k=1)), dim=1), greedy)
    one, same, other = (torch.stack(list(generate(model, prompt, 20, seed=s))) for s in (5, 5, 6))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_errors_say_what_to_do():
    model = GPT(SMALL)
    with pytest.raises(ValueError, match="33 positions exceed the model's context of 32"):
        model(tokens(1, 33))
    with pytest.raises(ValueError, match="shorten one"):
        next(generate(model, tokens(1, 30), 3))
    with pytest.raises(ValueError, match=r"dim must be a multiple of 2 \* heads"):
        GPTConfig(dim=20, heads=4)
    with pytest.raises(ValueError, match=r"GPTConfig.layers must be a positive integer, got 0"):
        GPTConfig(layers=0)


def test_bf16_model_keeps_exact_positions():
    """The angles are computed, not stored, so casting the model cannot round them."""
    model = GPT(SMALL).bfloat16()
    assert not list(model.buffers())
    assert rope(torch.arange(3), 8, 10000.0)[0].dtype == torch.float32
    assert model(tokens(1, 8)).dtype == torch.bfloat16
