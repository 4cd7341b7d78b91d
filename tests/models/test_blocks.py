"""Which blocks a model repeats, and a chain of them that is run one block at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.checkpointing.block_table import blocks_of
from lowbit.memory import checkpoint_, stream_blocks_
from lowbit.models.blocks import Chain, find_blocks, largest_stack, stacks
from lowbit.models.wrap import wrappers


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(x) * scale, scale


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), torch.tensor(0.5)
        for block in self.blocks:
            x, _ = block(x, scale=scale)
        return self.head(x)


def test_blocks_are_the_largest_list_of_modules_of_one_class():
    model = Model()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert find_blocks(nn.ModuleList([Block()])) == [], "one block is no repetition"
    block = Block()
    assert find_blocks(nn.ModuleList([block, block])) == [block, block]


class Other(Block):
    """Blocks of a second class."""


def hybrid(*kinds: type[Block]) -> list[nn.Module]:
    return [kind() for kind in kinds]


def test_a_stack_may_have_blocks_of_two_classes():
    blocks = nn.ModuleList(hybrid(Block, Block, Other, Block, Block, Other))
    assert stacks(nn.ModuleDict({"embed": nn.Embedding(999, 8), "layers": blocks})) == [list(blocks)]
    one = nn.ModuleList(hybrid(Block, Block, Other))
    assert stacks(one) == [list(one)], "a class that comes once is of a stack as well"
    assert stacks(nn.ModuleList(hybrid(Block, Other))) == [], "nothing is repeated"


def test_a_sequential_of_blocks_begins_and_ends_with_what_is_no_block():
    blocks = hybrid(Block, Other, Block, Other)
    model = nn.Sequential(nn.Embedding(999, 8), *blocks, nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8)))
    assert stacks(model) == [blocks]


def test_each_stack_counts_and_a_chain_is_the_largest():
    model = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
    assert stacks(model) == [list(model.encoder.layers), list(model.decoder.layers)]
    assert find_blocks(model) == [*model.encoder.layers, *model.decoder.layers]
    assert largest_stack(model) == list(model.decoder.layers)


def test_blocks_within_blocks_are_parts_of_them():
    outer = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ModuleList(hybrid(Block, Block))) for _ in range(2))
    assert stacks(nn.ModuleDict({"stages": outer})) == [list(outer)]


T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 4}
BART = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
MAMBA = {"n_mamba_heads": 8, "mamba_d_state": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "use_mamba_kernels": False}
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
#: Blocks of each stack, by class and its config.
MODELS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "T5ForConditionalGeneration": ([3, 4], T5),
    "BartForConditionalGeneration": ([3, 4], BART),
    "WhisperForConditionalGeneration": ([3, 4], {**BART, "pad_token_id": 0}),
    "Zamba2ForCausalLM": (
        [6],
        {**SIZE, **MAMBA, "num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
         "attention_hidden_size": 64, "attention_head_dim": 16, "num_mem_blocks": 1},
    ),
    "JambaForCausalLM": (
        [4],
        {**SIZE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
         "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_technique_takes_the_same_blocks(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    sizes, settings = MODELS[name]
    model = cls(cls.config_class(vocab_size=64, **settings))
    assert list(map(len, stacks(model))) == sizes
    blocks = blocks_of(model)
    assert len(blocks) == sum(sizes)
    report = checkpoint_(model, "block")
    assert [layer.name for layer in report.layers] == blocks
    assert not any(note.startswith("warning") for note in report.notes)
    assert [layer.name for layer in stream_blocks_(model, tmp_path).layers] == blocks


def test_a_policy_that_saves_next_to_nothing_says_so():
    model = nn.Sequential(nn.ModuleList(Block(4) for _ in range(2)), nn.Sequential(nn.Linear(99, 99), nn.ReLU()))
    report = checkpoint_(model, [model[0][0]])
    assert any(note.startswith("warning: the checkpointed modules hold 0.2% of the weights") for note in report.notes)
    assert checkpoint_(model[0], "block").notes == ()


def test_checkpointing_needs_blocks():
    with pytest.raises(ValueError, match=r"Linear has no ModuleList or Sequential .*pass a list of modules"):
        checkpoint_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got a list that chooses none"):
        checkpoint_(nn.Linear(2, 2), [])
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"a pattern is a string .*got int"):
        checkpoint_(model, [model[0], 0])
    with pytest.raises(ValueError, match="a Linear of the list is no module of the model"):
        checkpoint_(model, [model[0], nn.Linear(2, 2)])
    assert type(model[0]) is nn.Linear


def test_a_chain_gives_each_block_what_the_one_before_returned():
    model, batches = Model(), [torch.randn(3, 4), torch.randn(2, 4)]
    expected = [model(x) for x in batches]
    chain = Chain(model.blocks)
    assert chain.record(model, batches)
    assert [call.kwargs.keys() for call in chain.calls[0]] == [{"scale"}] * 3
    for index in range(3):
        chain.advance(index)
    for number, y in enumerate(expected):
        assert torch.equal(model.head(chain.hidden[number]), y)
        with chain.replayed(number):
            assert torch.equal(model(batches[number]), y)
    assert not any(wrappers(block) for block in model.blocks)


def test_blocks_that_are_not_called_in_order_are_no_chain():
    model = Model()
    assert not Chain(list(reversed(model.blocks))).record(model, [torch.randn(3, 4)])


def test_a_forward_that_a_block_was_given_is_there_afterwards():
    model = Model()
    forward = model.blocks[1].forward
    own = model.blocks[1].forward = lambda x, scale: forward(2 * x, scale)
    chain, x = Chain(model.blocks), torch.randn(3, 4)
    expected = model(x)
    assert chain.record(model, [x])
    for index in range(3):
        chain.advance(index)
    assert torch.equal(model.head(chain.hidden[0]), expected)
    assert vars(model.blocks[1])["forward"] is own and not any(wrappers(block) for block in model.blocks)
