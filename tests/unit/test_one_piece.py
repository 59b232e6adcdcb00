"""Weights in one allocation: the same model, what is tied stays tied, and no more bytes than its tensors have."""

import itertools

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moespeq.model.one_piece import move_in_one_piece


def tied_model() -> Qwen2MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=40,
        tie_word_embeddings=True,
    )
    return Qwen2MoeForCausalLM(config).eval().requires_grad_(False)


def test_a_moved_model_computes_the_same_from_one_allocation() -> None:
    model, ids = tied_model(), torch.arange(9)[None]
    expected = model(ids).logits
    tensors = list(itertools.chain(model.parameters(), model.buffers()))

    moved = move_in_one_piece(model, "cpu")

    assert torch.equal(moved(ids).logits, expected)
    places = [tensor.untyped_storage() for tensor in itertools.chain(moved.parameters(), moved.buffers())]
    assert len({place.data_ptr() for place in places}) == 1
    assert places[0].nbytes() <= sum(tensor.nbytes + 255 for tensor in tensors)
    assert moved.lm_head.weight.data_ptr() == moved.model.embed_tokens.weight.data_ptr()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in moved.parameters())
