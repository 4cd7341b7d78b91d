"""Checkpointed models that make a cache in training: hybrids, shared keys and values, states in plain attributes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.checkpointing.caches import is_filled
from lowbit.checkpointing.frame import NotReplayed
from lowbit.memory import checkpoint_

transformers = pytest.importorskip("transformers")

_SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_SHARED = {
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
}  # fmt: skip
#: Classes by what their caches hold besides keys and values of each layer.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": _DELTA,
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 16},
    "NemotronHForCausalLM": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "use_mamba_kernels": False,
    },
    "Gemma4ForCausalLM": {**_SHARED, "global_head_dim": 8},
    "Gemma3nForCausalLM": {
        **_SHARED, "altup_num_inputs": 2, "laurel_rank": 4, "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "MambaForCausalLM": {"state_size": 8, "time_step_rank": 4},
    "RecurrentGemmaForCausalLM": {
        "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"],
    },
    "LlamaForCausalLM": {},
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    cls = getattr(transformers, name, None)
    if cls is None:
        pytest.skip(f"this transformers has no {name}")
    config = cls.config_class(**{**_SIZE, **MODELS[name]})
    return cls(getattr(config, "text_config", None) or config).train(), torch.randint(3, 60, (2, 12))


def trained(model: nn.Module, tokens: Tensor, **settings: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(tokens, labels=tokens, **settings).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_makes_a_cache_trains_with_the_bits_of_one_without(name):
    model, tokens = made(name)
    plain = trained(model, tokens, use_cache=False)
    for policy, settings in (("block", {}), ("every:2", {}), ("sqrt", {"use_cache": True})):
        checkpoint_(model, policy)
        found = trained(model, tokens, **settings)
        assert len(found) == len(plain) and all(map(torch.equal, found, plain)), policy


def test_a_cache_says_layer_by_layer_what_it_holds():
    model, tokens = made("Lfm2ForCausalLM")
    cache = model.eval()(tokens).past_key_values
    assert [is_filled(cache, place) for place in range(5)] == [True] * 4 + [False]
    assert not any(is_filled(type(cache)(config=model.config), place) for place in range(5))
    checkpoint_(model.train())
    with pytest.raises(ValueError, match=r"expected an empty cache for 'model\.layers\.0'.*\"mlp\""):
        model(tokens, past_key_values=cache)


def test_cross_attention_with_tokens_is_a_filled_cache():
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    assert not is_filled(cache, 0)
    cache.cross_attention_cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert is_filled(cache, 0) and not is_filled(cache, 1)


def test_prefix_tuning_trains_with_what_the_refusal_advises():
    peft = pytest.importorskip("peft")
    model, tokens = made("LlamaForCausalLM")
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).train()
    plain = trained(model, tokens)
    checkpoint_(model, "block")
    with pytest.raises(ValueError, match=r"expected an empty cache .*memory\.checkpoint_\(model, \"mlp\"\)"):
        trained(model, tokens)
    checkpoint_(model, "mlp")
    assert all(map(torch.equal, trained(model, tokens), plain))


class Recurrent(nn.Module):
    """States in plain attributes: one that is replaced, one that is written to, one that a first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.made = nn.Linear(8, 8), torch.zeros(8), None
        self.count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = x.detach().mean(0)
        self.count += 1
        y = self.inner(x).tanh() * self.made + self.state * self.count
        self.state = 0.5 * self.state + y.detach().mean(0)
        return y.sin()


@pytest.mark.parametrize("policy", ["block", "save_matmuls", "segments:1"])
def test_states_in_plain_attributes_move_once_a_step(policy):
    torch.manual_seed(0)
    plain, x = nn.Sequential(Recurrent(), Recurrent()), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    checkpoint_(model, policy)
    for _ in range(3):
        for one in (plain, model):
            one(x).square().mean().backward()
        assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (plain, model))))
        for block, other in zip(plain, model, strict=True):
            assert all(torch.equal(vars(block)[name], vars(other)[name]) for name in ("state", "made", "count"))


class Appending(nn.Module):
    """Writes to the state that it is given while ``use_cache`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, state: Tensor, use_cache: bool = False) -> Tensor:
        y = self.inner(x + state).tanh()
        if use_cache:
            state.add_(y.detach())
        return y


def test_a_call_that_writes_to_its_cache_is_told_what_helps():
    model, x = nn.ModuleList([Appending(), Appending()]), torch.randn(4, 8)
    checkpoint_(model)
    with pytest.raises(NotReplayed, match=r"writes to a tensor .*; or call the model with use_cache=False"):
        model[0](x, torch.zeros(4, 8), use_cache=True)
    model[0](x, torch.zeros(4, 8)).sum().backward()
