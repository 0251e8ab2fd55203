"""If a layer may be rewritten, a change of basis inside its heads leaves the real model's logits what they were.

This is what `aligned` and `folded` rely on: the rotary layout that was found, the norms, and that nothing else looks
inside a head. Every type that may be rewritten is checked on its own class.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from headfold.checkpoint.source import Checkpoint
from headfold.convert.family.family import find_family
from headfold.convert.family.model_type import ModelType
from headfold.convert.family.rotary import Rotary
from headfold.convert.methods.attention import Attention
from headfold.convert.methods.layer import disk_tensors, read_attention
from tiny import logits_of, tiny_model
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHECKED = """
llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi olmo granite cohere cohere2 stablelm starcoder2 glm smollm3
seed_oss helium nemotron mixtral ernie4_5 recurrent_gemma phi3 falcon
"""
OTHERS = """
apertus arcee aria_text bamba cohere2_moe cohere_compass_text cwm dots1 emu3 ernie4_5_moe exaone4 exaone_moe
falcon_h1 glm4 glm4_moe got_ocr2 granitemoe granitemoeshared hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1
lara_mini mellum minimax minimax_m3_vl_text ministral ministral3 moss_transcribe_diarize phimoe qwen2_moe qwen3_moe
solar_open vaultgemma phi4_multimodal
"""


def _available(types: str) -> list[str]:
    """Those that this transformers has."""
    return sorted(name for name in types.split() if name in CONFIG_MAPPING)


def test_the_lists_are_not_empty() -> None:
    assert len(_available(CHECKED)) >= 15


def _turned(attention: Attention, rotary: Rotary) -> Attention:
    """Each KV head in a basis of its own: V by any invertible map, K by a complex number per plane, unless normed."""
    generator = torch.Generator().manual_seed(0)
    per_kv = attention.query_heads // attention.kv_heads
    q, k, v, o = (t.double().clone() for t in (attention.q_HDC, attention.k_KDC, attention.v_KDC, attention.o_CHD))
    q_bias, k_bias, v_bias = (
        None if t is None else t.double().clone()
        for t in (attention.q_bias_HD, attention.k_bias_KD, attention.v_bias_KD)
    )
    for head in range(attention.kv_heads):
        queries = slice(head * per_kv, (head + 1) * per_kv)
        mix = (
            torch.eye(v.shape[1]).double()
            + 0.3 * torch.randn(v.shape[1], v.shape[1], generator=generator, dtype=torch.float64) / v.shape[1] ** 0.5
        )
        v[head] = mix @ v[head]
        o[:, queries] = o[:, queries] @ torch.linalg.inv(mix)
        if v_bias is not None:
            v_bias[head] = mix @ v_bias[head]
        if not attention.keys_normed:
            gain, back = _gains(k.shape[1], rotary, generator)
            k[head], q[queries] = gain @ k[head], back @ q[queries]
            if k_bias is not None:
                k_bias[head] = gain @ k_bias[head]
            if q_bias is not None:
                q_bias[queries] = q_bias[queries] @ back.T
    return replace(attention, q_HDC=q, k_KDC=k, v_KDC=v, o_CHD=o, q_bias_HD=q_bias, k_bias_KD=k_bias, v_bias_KD=v_bias)


def _gains(head_dim: int, rotary: Rotary, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A map of the key rows that commutes with every rotation, and the inverse transpose for the queries."""
    gain = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    half = rotary.dim // 2
    for plane in range(half):
        a, b = (plane, plane + half) if rotary.layout == "half" else (2 * plane, 2 * plane + 1)
        x, y = (torch.randn(2, generator=generator, dtype=torch.float64) + torch.tensor([1.5, 0.0])).tolist()
        gain[a, a] = gain[b, b] = x
        gain[a, b], gain[b, a] = y, -y
    passing = head_dim - rotary.dim
    if passing:
        noise = torch.randn(passing, passing, generator=generator, dtype=torch.float64)
        gain[rotary.dim :, rotary.dim :] = torch.eye(passing) + 0.3 * noise / passing**0.5
    return gain, torch.linalg.inv(gain).T


def _rewrite(model_type: str, folder: Path, layout: str | None = None) -> tuple[Tensor, Tensor]:
    """Logits before and after every block is rewritten in another basis (with a wrong layout for controls)."""
    model = tiny_model(model_type, 4, 2)
    before = logits_of(model)
    model.save_pretrained(folder)
    source = Checkpoint.open(folder)
    family = find_family(source, ModelType(source.config), 1)
    values = model.state_dict()
    for block in family.layers:
        assert block.rewrite_obstacle is None
        attention = read_attention(source, family, block)
        rotary = attention.rotary if layout is None else Rotary(layout, attention.rotary.dim)
        for name, tensor in disk_tensors(family, block, _turned(attention, rotary)).items():
            values[f"{block.module}.{'.'.join(name.split('.')[-2:])}"].copy_(tensor)
    return before, logits_of(model)


@pytest.mark.parametrize("model_type", _available(CHECKED))
def test_a_change_of_basis_leaves_the_logits(model_type: str, tmp_path: Path) -> None:
    before, after = _rewrite(model_type, tmp_path)
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", _available(OTHERS))
def test_a_change_of_basis_leaves_the_logits_in_all_other_types(model_type: str, tmp_path: Path) -> None:
    before, after = _rewrite(model_type, tmp_path)
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize(
    ("model_type", "wrong"), [("llama", "interleaved"), ("cohere", "half"), ("glm", "half"), ("phi3", "interleaved")]
)
def test_control_the_wrong_rotary_layout_changes_them(model_type: str, wrong: str, tmp_path: Path) -> None:
    before, after = _rewrite(model_type, tmp_path, wrong)
    assert (before - after).abs().max() > 1e-2 * before.abs().max()
