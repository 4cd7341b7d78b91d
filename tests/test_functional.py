"""What the public functions make of their arguments before an op sees them."""

import pytest
import torch

import lowbit as lb


def test_a_seed_is_drawn_on_the_cpu_whatever_the_default_device():
    x = torch.randn(4, 32)
    torch.manual_seed(3)
    expected = lb.encode(x, "fp4_e2m1", rounding="stochastic")
    torch.manual_seed(3)
    with torch.device("meta"):
        assert torch.equal(lb.encode(x, "fp4_e2m1", rounding="stochastic"), expected)


@pytest.mark.parametrize(("name", "bits"), [("seed", 64), ("step", 32), ("stream", 32), ("offset", 64), ("pitch", 64)])
def test_words_of_the_random_bits_are_signed_or_unsigned_and_never_wrap(name, bits):
    x = torch.randn(4, 32)
    code = lambda word: lb.encode(x, "fp4_e2m1", rounding="stochastic", **{"seed": 1, name: word})
    assert torch.equal(code(-1), code((1 << bits) - 1)) and torch.equal(code(-1 << bits - 1), code(1 << bits - 1))
    for word in (1 << bits, (-1 << bits - 1) - 1):
        with pytest.raises(
            ValueError, match=rf"{name}: expected an integer of {bits} bits, got {word}; take it modulo"
        ):
            code(word)
