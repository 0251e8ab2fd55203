"""Estimates of operations and memory."""

from __future__ import annotations

import pytest
import torch
from headfold.checkpoint.load import load_language_model
from headfold.uptrain.estimate.cost import estimate_cost
from headfold.uptrain.estimate.model_size import ModelSize, model_without_weights
from headfold.uptrain.settings import UptrainSettings


def test_operations_and_memory_of_a_known_model():
    """Llama-2-7B: 6.74 G parameters, 16 bytes each for weights, gradient and moments, 2 more for a copy in bf16."""
    llama = ModelSize(6_738_415_616, 6_738_415_616, 131_072_000, 32, 4096, 11008, 32000)
    settings = UptrainSettings(sequence_length=4096, micro_batch=1, gradient_checkpointing=True)
    alone = estimate_cost(settings, 10**9, llama, llama, bf16=True)
    multiplied = 6_738_415_616 - 131_072_000
    assert alone.flops == 8 * multiplied * 10**9
    held = sum(alone.memory[name] for name in ("weights", "gradients", "optimizer"))
    assert held == 16 * 6_738_415_616
    assert alone.memory["teacher"] == 2 * 6_738_415_616
    assert alone.memory["weights in bf16"] == 2 * 6_738_415_616
    shared = estimate_cost(settings, 10**9, llama, llama, processes=8, sharded=True, bf16=True)
    assert "weights in bf16" not in shared.memory
    assert shared.memory["weights"] == alone.memory["weights"] // 8
    assert shared.memory["activations"] == alone.memory["activations"]
    kept = estimate_cost(settings.model_copy(update={"gradient_checkpointing": False}), 10**9, llama, bf16=True)
    assert kept.memory["activations"] > 10 * alone.memory["activations"] / 4
    hidden = settings.model_copy(update={"hidden_weight": 1.0})
    assert estimate_cost(hidden, 10**9, llama, llama, bf16=True).memory["hidden states"] == 32 * 4096 * 4096 * 4
    small = estimate_cost(settings.model_copy(update={"micro_batch": 64, "batch": 1}), 10**9, llama, llama, bf16=True)
    assert small.memory["activations"] == alone.memory["activations"]  # no more than the batch


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "t5", "bart"])
def test_the_estimated_activations_match_what_autograd_keeps(model_type, bf16):
    """Within a factor of two for layers of a usual shape; in bf16 with a copy of each weight that is multiplied."""
    from headfold.checkpoint.backbone import Backbone
    from tiny import tiny_model, tiny_pair

    pair = model_type in ("t5", "bart")
    wide = {"d_ff": 256, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    model = tiny_pair(model_type, **wide) if pair else tiny_model(model_type, heads=8, intermediate_size=352)
    model.train()
    ids = torch.ones(4, 64, dtype=torch.long)
    backbone, inputs = Backbone.of(model), {"input_ids": ids, **({"decoder_input_ids": ids} if pair else {})}
    kept: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        states = backbone(**inputs, use_cache=False).last_hidden_state
        found = sum(kept.values())
        del states
    shape = ModelSize.of(model, encoder_decoder=pair)
    wanted = UptrainSettings(sequence_length=64, micro_batch=4, target_column="answer" if pair else None)
    plan = estimate_cost(wanted, 1, shape, bf16=bf16)
    head = shape.vocabulary * shape.hidden
    copied = 2 * (shape.parameters - shape.looked_up - head) if bf16 else 0  # of the layers alone
    assert found / 2 < plan.memory["activations"] + copied < found * 2


@pytest.mark.parametrize(("kind", "embeddings"), [("shared", 1), ("one a side", 2), ("and a head of its own", 3)])
def test_parameters_are_split_into_multiplied_and_looked_up(kind, embeddings):
    """Marian's tables by hand: positions and embeddings are looked up, the head is multiplied once a target."""
    from tiny import tiny_pair

    model = tiny_pair(
        "marian", share_encoder_decoder_embeddings=embeddings == 1, tie_word_embeddings=embeddings < 3,
        max_position_embeddings=40,
    )  # fmt: skip
    width, rows, inner = 64, 300, 48
    attention, norm, head = 4 * (width**2 + width), 2 * width, rows * width
    feed_forward = 2 * width * inner + width + inner
    source = 2 * (width**2 + width)  # keys and values of what was read
    read = 2 * (attention + feed_forward + 2 * norm) + 2 * source
    written = 2 * (2 * attention + feed_forward + 3 * norm) - 2 * source + head
    shape = ModelSize.of(model, encoder_decoder=True)
    assert sum(one.numel() for one in model.parameters()) == shape.parameters
    assert shape.looked_up == (embeddings - 1) * head + 2 * 40 * width
    assert (shape.written, shape.per_token(1.0)) == (written, read + written)
    assert shape.per_token(0.25) == round(read + written / 4)


def test_positions_of_a_decoder_are_looked_up_too():
    from tiny import tiny_model

    gpt2 = tiny_model("gpt2", n_positions=40)
    assert ModelSize.of(gpt2, encoder_decoder=False).looked_up == gpt2.transformer.wpe.weight.numel() == 40 * 64


def test_memory_of_hidden_states_counts_written_tokens(tiny_t5):
    """Those of the two decoder layers at 114 targets for 512 tokens read, against those of a decoder for all 512."""
    shape = ModelSize.of(model_without_weights(tiny_t5)[0], encoder_decoder=True)
    wanted = UptrainSettings(sequence_length=512, micro_batch=2, hidden_weight=1.0)
    assert estimate_cost(wanted, 1, shape, shape).memory["hidden states"] == 2 * 2 * 114 * 32 * 4
    pairs = wanted.model_copy(update={"target_column": "answer"})
    assert estimate_cost(pairs, 1, shape, shape).memory["hidden states"] == 2 * 2 * 512 * 32 * 4


def test_operations_are_counted_by_what_each_side_reads_and_writes(tiny_t5):
    """By hand: the encoder and the keys and values of cross-attention once a source token, the rest once a target."""
    from headfold.uptrain.estimate.cost import estimate_cost, flops_per_token, targets_per_token
    from headfold.uptrain.estimate.model_size import ModelSize
    from headfold.uptrain.settings import UptrainSettings

    model = load_language_model(tiny_t5)
    wanted = UptrainSettings(sequence_length=512, steps=1)
    assert targets_per_token(wanted, True) == 114 / 512
    assert targets_per_token(wanted, False) == targets_per_token(UptrainSettings(target_column="answer"), True) == 1
    attention, feed_forward, norm = 4 * 32 * 32, 2 * 32 * 64, 32
    buckets, vocabulary = 32 * 4, 31  # of relative positions, which are looked up, on each side
    read = 2 * (attention + feed_forward + 2 * norm) + norm + 2 * 2 * 32 * 32
    written = 2 * (2 * attention - 2 * 32 * 32 + feed_forward + 3 * norm) + norm + vocabulary * 32
    shape = ModelSize.of(model, encoder_decoder=True)
    assert (shape.parameters, shape.looked_up) == (read + written + 2 * buckets, 2 * buckets)
    assert (shape.written, shape.decoder_layers) == (written, 2)
    assert flops_per_token(shape, targets=0.25) == 6 * round(read + written / 4)
    assert flops_per_token(shape, shape) == 8 * (read + written)
    assert estimate_cost(wanted, 512, shape).flops == pytest.approx(6 * (512 * read + 114 * written), rel=1e-3)
