"""Products of tiles: rounded as asked, in the precision that the processor is fast in."""

import pytest
import torch

from lowbit.memory import products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_products_are_fp32_products_without_instructions_for_16_bits(monkeypatch, dtype):
    a, b = torch.randn(7, 33).to(dtype), torch.randn(33, 5).to(dtype)
    exact = a.float() @ b.float()
    monkeypatch.setattr(products, "multiplies", lambda asked: asked == torch.float32)
    assert torch.equal(products.product(a, b, dtype, rounded=True), exact.to(dtype).float())
    assert torch.equal(products.product(a, b, dtype), exact)
    monkeypatch.setattr(products, "multiplies", lambda asked: True)
    assert torch.equal(products.product(a, b, dtype, rounded=True), (a @ b).float())
