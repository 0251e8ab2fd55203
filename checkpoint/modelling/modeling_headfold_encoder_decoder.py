"""Encoder-decoders with grouped-query attention: T5, and BART with mBART, Marian, Pegasus and M2M-100.

headfold wrote this file. It needs torch and transformers, nothing else. Several query heads share one head of keys and
values (Ainslie et al. 2023, section 2.2): query heads j·n … (j+1)·n - 1 read KV head j. Everything else is computed as
in T5 (Raffel et al. 2019, section 2.1: norms come first and have no mean and no bias, relative positions are biases of
the scores, scores are not scaled) and in BART (Lewis et al. 2019). mBART, Marian, Pegasus and M2M-100 are settings of
BART: where norms stand, and how positions are told apart. Parameters have the names that those models give them.

Letters of shapes: B sequences, T tokens that queries come from, S tokens that keys come from (of the encoder in
cross-attention; of the same sequence, cached tokens included, in self-attention), C hidden width, H query heads,
G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

TESTED = ("4.57", "5.24")
"""Versions of transformers (major.minor) in which this file was found to compute the right numbers."""

_HERE = ".".join(transformers.__version__.split(".")[:2])
if _HERE not in TESTED:
    raise ImportError(
        f"this file was tested with transformers {' and '.join(TESTED)}, and this is {transformers.__version__}. "
        f'Install a tested one (pip install "transformers=={TESTED[-1]}.*").'
    )

_CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
"""Name of the cache in the outputs of this version of transformers."""


def attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias: Tensor | None, dropout: float, scale: float, weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with neighbouring query heads sharing a KV head. Keys and values are not repeated in memory.

    Args:
        bias: added to the scores, broadcastable to (B, H, T, S).
        weights: return the attention weights (B, H, T, S), too.
    """
    batch, heads, queries, width = q_BHTD.shape
    groups, keys = k_BGSD.shape[1:3]
    # the queries that share a KV head become rows of that head
    q = q_BHTD.reshape(batch, groups, heads // groups * queries, width)
    if bias is not None and bias.shape[1:3] != (1, 1):
        bias = bias.expand(-1, heads, queries, -1).reshape(-1, groups, heads // groups * queries, keys)
    if not weights:
        made = F.scaled_dot_product_attention(q, k_BGSD, v_BGSD, attn_mask=bias, dropout_p=dropout, scale=scale)
        return made.reshape(batch, heads, queries, -1), None
    scores = q @ k_BGSD.transpose(2, 3) * scale
    shares = F.softmax((scores if bias is None else scores + bias).float(), dim=-1).to(q.dtype)
    made = F.dropout(shares, dropout) @ v_BGSD
    return made.reshape(batch, heads, queries, -1), shares.reshape(batch, heads, queries, keys)


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask into a bias of the scores: 0 where it is true or 1, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask.bool(), torch.finfo(dtype).min)


def require_columns(mask: Tensor | None, keys: int) -> None:
    """Refuse a mask (B, S) without exactly one column per key.

    Raises:
        ValueError: it has too few columns, or too many.
    """
    if mask is not None and mask.dim() == 2 and mask.shape[1] != keys:
        raise ValueError(f"The attention mask must have a column for each of {keys} tokens, not {mask.shape[1]}.")


def refuse_unknown(given: dict[str, Any]) -> None:
    """Refuse arguments that this model would ignore, apart from those that change no number.

    Raises:
        ValueError: such an argument is given.
    """
    harmless = ("cache_position", "return_dict", "use_cache")
    unknown = sorted(name for name, value in given.items() if value is not None and name not in harmless)
    if unknown:
        raise ValueError(f"This model does not know {', '.join(unknown)}.")


def mean_loss(logits_BTV: Tensor, labels_BT: Tensor, count: Any) -> Tensor:
    """Cross entropy in float32: the mean over targets, or the sum divided by ``count``."""
    targets, logits = labels_BT.flatten().to(logits_BTV.device), logits_BTV.flatten(0, 1).float()
    if count is None:
        return F.cross_entropy(logits, targets, ignore_index=-100)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count


class HeadfoldEncoderDecoderAttention(nn.Module):
    """Self-attention, or cross-attention where it is given the encoder's states.

    Attributes:
        NAMES: parameter names of the projections of queries, keys, values and of the output.
    """

    NAMES: tuple[str, str, str, str]

    def __init__(self, config: Any, layer: int, heads: int, kv_heads: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.config, self.layer, self.width = config, layer, width
        self.scale, self.dropout = width**-0.5, 0.0
        *sides, output = self.NAMES
        for name, count in zip(sides, (heads, kv_heads, kv_heads), strict=True):
            self.add_module(name, nn.Linear(config.d_model, count * width, bias=bias))
        self.add_module(output, nn.Linear(heads * width, config.d_model, bias=bias))

    def forward(
        self,
        states_BTC: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        memory_BSC: Tensor | None = None,
        cache: Any = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the output (B, T, C), the bias of the scores for the next layers, and attention weights on request.

        Args:
            mask: mask of the keys (B, S), or a finished one (B, 1, T, S). Only the first layer reads it.
            bias: bias of the layer before. None in the first layer.
        """
        past = 0 if cache is None or memory_BSC is not None else cache.self_attention_cache.get_seq_length(self.layer)
        past = past.clone() if isinstance(past, Tensor) else past  # a static cache counts in place
        q = self._heads(states_BTC, 0)
        k, v = self._keys_values(states_BTC, memory_BSC, cache, past)
        if bias is None and memory_BSC is None:
            bias = self._bias(q.shape[2], k.shape[2], past, mask, q)
        made, shares = attend(q, k, v, bias, self.dropout if self.training else 0.0, self.scale, weights)
        return getattr(self, self.NAMES[3])(made.transpose(1, 2).flatten(2)), bias, shares

    def _heads(self, states: Tensor, side: int) -> Tensor:
        return getattr(self, self.NAMES[side])(states).unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _keys_values(self, states: Tensor, memory: Tensor | None, cache: Any, past: Any) -> tuple[Tensor, Tensor]:
        """(B, G, S, D) each. Those of the encoder's states are computed once and cached."""
        if memory is not None and cache is not None and cache.is_updated.get(self.layer):
            held = cache.cross_attention_cache.layers[self.layer]
            return held.keys, held.values
        source = states if memory is None else memory
        k, v = self._heads(source, 1), self._heads(source, 2)
        if cache is None:
            return k, v
        place = torch.arange(k.shape[2], device=k.device) + past
        part = cache.self_attention_cache if memory is None else cache.cross_attention_cache
        k, v = part.update(k, v, self.layer, cache_kwargs={"cache_position": place})
        if memory is not None:
            cache.is_updated[self.layer] = True
        return k, v

    def _bias(self, queries: int, keys: int, past: Any, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """Add up the biases of positions and masks, broadcastable to (B, H, T, S). None: every query sees every key."""
        position_T = torch.arange(queries, device=like.device)[:, None] + past
        distance_TS = torch.arange(keys, device=like.device)[None, :] - position_T
        bias = self._position_bias(distance_TS, like.dtype)
        if mask is not None and mask.dim() == 4:  # made by generation, and already causal
            added = (mask_bias(mask, like.dtype) if mask.dtype == torch.bool else mask)[..., :keys]
            return added if bias is None else bias + added
        allowed = (distance_TS <= 0)[None, None] if self.config.is_decoder else None
        if mask is not None:  # a static cache has room to spare, which no query reaches yet
            real = F.pad(mask.bool(), (0, keys - mask.shape[1]), value=True)[:, None, None]
            allowed = real if allowed is None else allowed & real
        if allowed is None:
            return bias
        added = mask_bias(allowed, like.dtype)
        return added if bias is None else bias + added

    def _position_bias(self, distance_TS: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Bias of the scores (1, H, T, S) by the distance from query to key, or None."""
        return None


class HeadfoldEncoderDecoderPreTrainedModel(PreTrainedModel):
    """Raises where transformers would only warn that weights are missing."""

    supports_gradient_checkpointing = True
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load as transformers does, but refuse missing and mismatched weights instead of filling in random numbers.

        Raises:
            ValueError: a weight is missing or has another shape.
        """
        found: Any = super().from_pretrained(*arguments, output_loading_info=True, **options)
        model, report = found
        wrong = sorted({*map(str, report["missing_keys"]), *map(str, report["mismatched_keys"])})
        if wrong:
            raise ValueError(f"the checkpoint lacks {', '.join(wrong[:4])}, or has other shapes ({len(wrong)} weights)")
        return (model, report) if output_loading_info else model


class HeadfoldEncoderDecoderStack(nn.Module):
    """An encoder or, where ``config.is_decoder``, a decoder.

    It is mixed into a :class:`HeadfoldEncoderDecoderPreTrainedModel`, and first, so that its embedding is found.

    Attributes:
        LAYERS: name of the list of layers.
        layer_drop: share of layers that a training step leaves out.
    """

    LAYERS: str
    layer_drop = 0.0
    config: Any
    _embedding: tuple[Any]
    """In a tuple, so that the module is not registered here: the whole model holds it under its one name on disk."""
    _gradient_checkpointing_func: Any
    gradient_checkpointing = False

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None, cache: Any) -> Tensor:
        """Embed ids (or take the embeddings given), with positions and dropout, (B, T, C)."""
        raise NotImplementedError

    def _finished(self, states: Tensor) -> Tensor:
        """Apply whatever follows the last layer."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        return self._embedding[0]

    def set_input_embeddings(self, value: Any) -> None:
        self._embedding = (value,)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Any = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return hidden states after the last layer (and norm), from ids (B, T) or embeddings (B, T, C)."""
        refuse_unknown(others)
        if cache is not None and self.gradient_checkpointing and self.training:
            raise ValueError("Gradient checkpointing runs layers twice, so this model takes no cache while it trains.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds (of the decoder: decoder_input_ids and so on).")
        eager = self.config._attn_implementation == "eager"
        weights = bool(self.config.output_attentions if output_attentions is None else output_attentions)
        keep = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        states = self._embedded(input_ids, inputs_embeds, cache)
        if cache is None or not cache.self_attention_cache.is_compileable:  # of one of fixed size see _bias
            past = 0 if cache is None else cache.self_attention_cache.get_seq_length()
            require_columns(attention_mask, past + states.shape[1])
        memory_bias = None
        if encoder_hidden_states is not None and encoder_attention_mask is not None:
            require_columns(encoder_attention_mask, encoder_hidden_states.shape[1])
            memory_bias = mask_bias(encoder_attention_mask[:, None, None], states.dtype)
        seen, bias = [states], None
        owns: list[Any] = []
        acrosses: list[Any] = []
        for layer in getattr(self, self.LAYERS):
            if self.training and self.layer_drop > 0 and torch.rand(()) < self.layer_drop:
                continue
            arguments = (states, attention_mask, bias, encoder_hidden_states, memory_bias, cache, weights or eager)
            if self.gradient_checkpointing and self.training:
                states, bias, own, across = self._gradient_checkpointing_func(layer.__call__, *arguments)
            else:
                states, bias, own, across = layer(*arguments)
            seen, owns, acrosses = [*seen, states] if keep else seen, [*owns, own], [*acrosses, across]
        states = self._finished(states)
        shown: dict[str, Any] = {"last_hidden_state": states}
        shown["hidden_states"] = (*seen[:-1], states) if keep else None
        shown["attentions"] = tuple(owns) if weights else None
        if not self.config.is_decoder:
            return BaseModelOutput(**shown)
        shown["cross_attentions"] = tuple(acrosses) if weights else None
        return BaseModelOutputWithPastAndCrossAttentions(**shown, **{_CACHE: cache})


class HeadfoldEncoderDecoderForConditionalGeneration(nn.Module):
    """Encoder, decoder and output head. It is mixed into a :class:`HeadfoldEncoderDecoderPreTrainedModel`, and first.

    Attributes:
        DECODES_ITS_INPUT: without targets, the decoder reads the encoder's input.
    """

    DECODES_ITS_INPUT: bool
    config: Any
    lm_head: nn.Module

    @property
    def _whole(self) -> Any:
        """The module that holds ``shared``, ``encoder`` and ``decoder``."""
        raise NotImplementedError

    def _logits(self, states_BTC: Tensor) -> Tensor:
        raise NotImplementedError

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self._whole.encoder

    def get_decoder(self, *_: Any, **__: Any) -> nn.Module:
        return self._whole.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self._whole.shared

    def set_input_embeddings(self, value: Any) -> None:
        self._whole.shared = value
        self._whole.encoder.set_input_embeddings(value)
        self._whole.decoder.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift targets (B, T) by one, so that they follow the start token or, for mBART, their own last token."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        last_token_first = getattr(self.config, "starts_with_last_token", False)
        if pad is None or (start is None and not last_token_first):
            raise ValueError("config.json must have decoder_start_token_id and pad_token_id to train with labels.")
        labels = labels.masked_fill(labels == -100, pad)
        shifted = labels.roll(1, dims=1)
        if last_token_first:
            shifted[:, 0] = labels.gather(1, labels.ne(pad).sum(1, keepdim=True) - 1)[:, 0]
        else:
            shifted[:, 0] = start
        return shifted

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        """Return logits (B, T, V) and, with ``labels`` (B, T), their mean cross entropy. Labels of -100 are left out.

        Args:
            past_key_values, cache: names of the same cache in transformers 4 and 5.
            num_items_in_batch: divide the summed loss by this instead of the number of targets.

        Raises:
            ValueError: an argument is given that the model does not know.
        """
        refuse_unknown(others)
        shown = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        if encoder_outputs is None:
            encoder_outputs = self._whole.encoder(input_ids, attention_mask, inputs_embeds, **shown)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            given = input_ids if labels is None and self.DECODES_ITS_INPUT else labels
            decoder_input_ids = None if given is None else self.prepare_decoder_input_ids_from_labels(given)
        cache = past_key_values if cache is None else cache
        checkpointing = self._whole.decoder.gradient_checkpointing and self.training
        if cache is None and not checkpointing and (self.config.use_cache if use_cache is None else use_cache):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoded = self._whole.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_inputs_embeds,
            encoder_outputs.last_hidden_state,
            attention_mask,
            cache,
            **shown,
        )
        logits = self._logits(decoded.last_hidden_state)
        output = Seq2SeqLMOutput(
            loss=None if labels is None else mean_loss(logits, labels, num_items_in_batch),
            logits=logits,
            decoder_hidden_states=decoded.hidden_states,
            decoder_attentions=decoded.attentions,
            cross_attentions=decoded.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
            **{_CACHE: cache},
        )
        return output.to_tuple() if return_dict is False else output


class HeadfoldT5Config(PretrainedConfig):
    """Settings of T5, and its numbers of KV heads.

    Args:
        num_key_value_heads: KV heads of the decoder, in self-attention and cross-attention; None: ``num_heads``.
        encoder_num_key_value_heads: of the encoder; None: ``num_heads``.
        dense_act_fn, is_gated_act: describe the feed-forward layer, as feed_forward_proj does in T5's own config.
        scale_decoder_outputs: multiply the input of the output head by d_model^-0.5, as models with a tied head do.
    """

    model_type = "headfold_t5"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    def __init__(
        self,
        vocab_size: int = 32128,
        d_model: int = 512,
        d_kv: int = 64,
        d_ff: int = 2048,
        num_layers: int = 6,
        num_decoder_layers: int | None = None,
        num_heads: int = 8,
        num_key_value_heads: int | None = None,
        encoder_num_key_value_heads: int | None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        dropout_rate: float = 0.1,
        layer_norm_epsilon: float = 1e-6,
        initializer_factor: float = 1.0,
        dense_act_fn: str = "relu",
        is_gated_act: bool = False,
        scale_decoder_outputs: bool = True,
        use_cache: bool = True,
        is_encoder_decoder: bool = True,
        pad_token_id: int | None = 0,
        eos_token_id: int | list[int] | None = 1,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.d_kv = d_kv
        self.d_ff = d_ff
        self.num_layers = num_layers
        self.num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads or num_heads
        self.encoder_num_key_value_heads = encoder_num_key_value_heads or num_heads
        self.relative_attention_num_buckets = relative_attention_num_buckets
        self.relative_attention_max_distance = relative_attention_max_distance
        self.dropout_rate = dropout_rate
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_factor = initializer_factor
        self.dense_act_fn, self.is_gated_act = dense_act_fn, is_gated_act
        self.scale_decoder_outputs = scale_decoder_outputs
        self.use_cache = use_cache
        for name, heads in (("decoder", self.num_key_value_heads), ("encoder", self.encoder_num_key_value_heads)):
            if num_heads % heads:
                raise ValueError(f"{num_heads} query heads cannot share {heads} KV heads of the {name} evenly.")
        ids: dict[str, Any] = {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id}
        super().__init__(**ids, **{"is_encoder_decoder": is_encoder_decoder, **kwargs})

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Return the decoder's part with its own number of layers, from which transformers sizes a cache."""
        found = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not encoder:
            found = copy.deepcopy(found)
            found.num_layers = self.num_decoder_layers
        return found


class HeadfoldT5LayerNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, config: HeadfoldT5Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.eps = config.layer_norm_epsilon

    def forward(self, states: Tensor) -> Tensor:
        scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + self.eps)
        normed = states * scale
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            normed = normed.to(self.weight.dtype)
        return self.weight * normed


class HeadfoldT5FeedForward(nn.Module):
    """Two layers, or the gated three of T5 1.1."""

    def __init__(self, config: HeadfoldT5Config) -> None:
        super().__init__()
        self.gated = config.is_gated_act
        if self.gated:
            self.wi_0 = nn.Linear(config.d_model, config.d_ff, bias=False)
            self.wi_1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        else:
            self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = ACT2FN[config.dense_act_fn]

    def forward(self, states: Tensor) -> Tensor:
        inner = self.act(self.wi_0(states)) * self.wi_1(states) if self.gated else self.act(self.wi(states))
        return self.wo(self.dropout(inner).to(self.wo.weight.dtype))  # wo stays in float32 in a float16 model


def buckets(distance: Tensor, both_ways: bool, count: int, farthest: int) -> Tensor:
    """Put each distance (key position less query position) into a bucket: half are exact, half are logarithmic."""
    first = torch.zeros_like(distance)
    if both_ways:
        count //= 2
        first = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = count // 2
    share = torch.log(distance.float().clamp(min=1) / exact) / math.log(farthest / exact)
    far = (exact + (share * (count - exact)).long()).clamp(max=count - 1)
    return first + torch.where(distance < exact, distance, far)


class HeadfoldT5Attention(HeadfoldEncoderDecoderAttention):
    """Attention with relative positions in the first layer, which hands its bias on to the others."""

    NAMES = ("q", "k", "v", "o")

    def __init__(self, config: HeadfoldT5Config, layer: int, kv_heads: int, positions: bool) -> None:
        super().__init__(config, layer, config.num_heads, kv_heads, config.d_kv, bias=False)
        self.scale, self.dropout = 1.0, config.dropout_rate
        if positions:
            self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_heads)

    def _position_bias(self, distance_TS: Tensor, dtype: torch.dtype) -> Tensor:
        count, farthest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        bucket_TS = buckets(distance_TS, not self.config.is_decoder, count, farthest)
        return self.relative_attention_bias(bucket_TS).permute(2, 0, 1)[None].to(dtype)


class HeadfoldT5Sublayer(nn.Module):
    """A norm, then attention or the feed-forward layer under the name that T5 gives it."""

    def __init__(self, config: HeadfoldT5Config, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)
        self.layer_norm = HeadfoldT5LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, states: Tensor, *arguments: Any) -> tuple[Any, ...]:
        made = getattr(self, self.name)(self.layer_norm(states), *arguments)
        first, *rest = made if isinstance(made, tuple) else (made,)
        states = states + self.dropout(first)
        if states.dtype == torch.float16:  # infinities would become NaN
            room = torch.where(states.isinf().any(), 1000, 0)
            limit = torch.finfo(states.dtype).max - room
            states = states.clamp(min=-limit, max=limit)
        return (states, *rest)


class HeadfoldT5Block(nn.Module):
    """Self-attention, cross-attention in the decoder, feed-forward."""

    def __init__(self, config: HeadfoldT5Config, layer: int, kv_heads: int) -> None:
        super().__init__()
        self.decodes = config.is_decoder
        attention = HeadfoldT5Attention(config, layer, kv_heads, positions=layer == 0)
        sublayers = [HeadfoldT5Sublayer(config, "SelfAttention", attention)]
        if self.decodes:
            across = HeadfoldT5Attention(config, layer, kv_heads, positions=False)
            sublayers.append(HeadfoldT5Sublayer(config, "EncDecAttention", across))
        sublayers.append(HeadfoldT5Sublayer(config, "DenseReluDense", HeadfoldT5FeedForward(config)))
        self.layer = nn.ModuleList(sublayers)

    def forward(
        self,
        states: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        memory: Tensor | None,
        memory_bias: Tensor | None,
        cache: Any,
        weights: bool,
    ) -> tuple[Any, ...]:
        """Return states, bias of self-attention, weights of self-attention and weights of cross-attention."""
        states, bias, own = self.layer[0](states, mask, bias, None, cache, weights)
        across = None
        if self.decodes:
            states, _, across = self.layer[1](states, None, memory_bias, memory, cache, weights)
        return self.layer[-1](states)[0], bias, own, across


class HeadfoldT5PreTrainedModel(HeadfoldEncoderDecoderPreTrainedModel):
    """Settings of loading, and T5's fresh weights."""

    config_class = HeadfoldT5Config
    base_model_prefix = "transformer"
    _no_split_modules = ["HeadfoldT5Block"]
    _keep_in_fp32_modules = ["wo"]

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as T5's first code did, in mesh tensorflow."""
        factor, width = self.config.initializer_factor, self.config.d_model
        stds: dict[str, float] = {}
        if isinstance(module, HeadfoldT5LayerNorm):
            nn.init.constant_(module.weight, factor)
        elif isinstance(module, HeadfoldT5ForConditionalGeneration):
            stds = {"shared": 1.0} | ({} if self.config.tie_word_embeddings else {"lm_head": 1.0})
        elif isinstance(module, HeadfoldT5FeedForward):
            stds = {"wi": width**-0.5, "wi_0": width**-0.5, "wi_1": width**-0.5, "wo": self.config.d_ff**-0.5}
        elif isinstance(module, HeadfoldT5Attention):
            inner = self.config.num_heads * self.config.d_kv
            stds = {"q": (width * self.config.d_kv) ** -0.5, "k": width**-0.5, "v": width**-0.5, "o": inner**-0.5}
            stds["relative_attention_bias"] = width**-0.5
        for name, std in stds.items():
            if hasattr(module, name):
                nn.init.normal_(getattr(module, name).weight, mean=0.0, std=factor * std)


class HeadfoldT5Stack(HeadfoldEncoderDecoderStack, HeadfoldT5PreTrainedModel):
    """The encoder or the decoder of T5."""

    LAYERS = "block"

    def __init__(self, config: HeadfoldT5Config, embedding: nn.Embedding) -> None:
        super().__init__(config)
        self._embedding = (embedding,)
        kv_heads = config.num_key_value_heads if config.is_decoder else config.encoder_num_key_value_heads
        layers = config.num_decoder_layers if config.is_decoder else config.num_layers
        self.block = nn.ModuleList(HeadfoldT5Block(config, layer, kv_heads) for layer in range(layers))
        self.final_layer_norm = HeadfoldT5LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.post_init()

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None, cache: Any) -> Tensor:
        return self.dropout(self._embedding[0](ids) if embeds is None else embeds)

    def _finished(self, states: Tensor) -> Tensor:
        return self.dropout(self.final_layer_norm(states))


class HeadfoldT5ForConditionalGeneration(
    HeadfoldEncoderDecoderForConditionalGeneration, HeadfoldT5PreTrainedModel, GenerationMixin
):
    """T5 with its output head."""

    DECODES_ITS_INPUT = False
    _tied_weights_keys = {"lm_head.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [  # old files hold copies of the embedding, and a bias that nothing reads
        r"^(encoder|decoder)\.embed_tokens\.weight$",
        r"EncDecAttention\.relative_attention_bias\.weight$",
    ]

    def __init__(self, config: HeadfoldT5Config) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        encoder_config, decoder_config = copy.deepcopy(config), copy.deepcopy(config)
        encoder_config.is_decoder, encoder_config.use_cache = False, False
        decoder_config.is_decoder = True
        self.encoder = HeadfoldT5Stack(encoder_config, self.shared)
        self.decoder = HeadfoldT5Stack(decoder_config, self.shared)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @property
    def _whole(self) -> Any:
        return self

    def _logits(self, states_BTC: Tensor) -> Tensor:
        scale = self.config.d_model**-0.5 if self.config.scale_decoder_outputs else 1.0
        return self.lm_head(states_BTC * scale)


class HeadfoldBartConfig(PretrainedConfig):
    """Settings of BART and the models like it, and their numbers of KV heads.

    Args:
        num_key_value_heads: KV heads of the decoder, in self-attention and cross-attention; None: all query heads.
        encoder_num_key_value_heads: of the encoder; None: all query heads.
        norms_first: norms precede attention and feed-forward layers (mBART, Pegasus, M2M-100); else they follow.
        final_norm: encoder and decoder end with a norm.
        embedding_norm: a norm follows the embeddings (BART, mBART).
        positions: ``table`` (learned rows, the first ``position_offset`` of them unused), ``waves`` (sines and cosines,
            Marian and Pegasus) or ``waves_past_padding`` (M2M-100's sines and cosines, where padding has no position).
        logits_bias: a fixed bias is added to the logits.
        starts_with_last_token: the decoder reads targets after their own last token (mBART's language), instead of
            after decoder_start_token_id.
    """

    model_type = "headfold_bart"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    def __init__(
        self,
        vocab_size: int = 50265,
        d_model: int = 1024,
        encoder_layers: int = 12,
        encoder_ffn_dim: int = 4096,
        encoder_attention_heads: int = 16,
        decoder_layers: int = 12,
        decoder_ffn_dim: int = 4096,
        decoder_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        encoder_num_key_value_heads: int | None = None,
        max_position_embeddings: int = 1024,
        positions: str = "table",
        position_offset: int = 2,
        norms_first: bool = False,
        final_norm: bool = False,
        embedding_norm: bool = True,
        logits_bias: bool = False,
        starts_with_last_token: bool = False,
        activation_function: str = "gelu",
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        encoder_layerdrop: float = 0.0,
        decoder_layerdrop: float = 0.0,
        init_std: float = 0.02,
        scale_embedding: bool = False,
        use_cache: bool = True,
        is_encoder_decoder: bool = True,
        pad_token_id: int | None = 1,
        bos_token_id: int | None = 0,
        eos_token_id: int | list[int] | None = 2,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.encoder_layers, self.decoder_layers = encoder_layers, decoder_layers
        self.encoder_ffn_dim, self.decoder_ffn_dim = encoder_ffn_dim, decoder_ffn_dim
        self.encoder_attention_heads, self.decoder_attention_heads = encoder_attention_heads, decoder_attention_heads
        self.num_key_value_heads = num_key_value_heads or decoder_attention_heads
        self.encoder_num_key_value_heads = encoder_num_key_value_heads or encoder_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.positions, self.position_offset = positions, position_offset
        self.norms_first, self.final_norm, self.embedding_norm = norms_first, final_norm, embedding_norm
        self.logits_bias, self.starts_with_last_token = logits_bias, starts_with_last_token
        self.activation_function = activation_function
        self.dropout, self.attention_dropout, self.activation_dropout = dropout, attention_dropout, activation_dropout
        self.encoder_layerdrop, self.decoder_layerdrop = encoder_layerdrop, decoder_layerdrop
        self.init_std = init_std
        self.scale_embedding = scale_embedding
        self.use_cache = use_cache
        sides = (
            ("decoder", decoder_attention_heads, self.num_key_value_heads),
            ("encoder", encoder_attention_heads, self.encoder_num_key_value_heads),
        )
        for name, queries, heads in sides:
            if queries % heads or d_model % queries:
                raise ValueError(f"{queries} query heads cannot share {heads} KV heads of the {name} evenly.")
        ids: dict[str, Any] = {"pad_token_id": pad_token_id, "bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
        super().__init__(**ids, **{"is_encoder_decoder": is_encoder_decoder, **kwargs})


class HeadfoldBartPositions(nn.Embedding):
    """A table of positions whose first rows are not used."""

    def __init__(self, config: HeadfoldBartConfig) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)
        self.offset = config.position_offset

    def forward(self, position_BT: Tensor) -> Tensor:
        return super().forward(position_BT + self.offset)


def sinusoids(position_BT: Tensor, width: int, past_padding: bool) -> Tensor:
    """Return sines, then cosines (Vaswani et al. 2017, section 3.5), (B, T, C). M2M-100 has another longest wave."""
    half = width // 2
    rates = torch.arange(half, dtype=torch.float64, device=position_BT.device) / (half - 1 if past_padding else half)
    turned = position_BT[..., None].double() * torch.exp(-math.log(10000.0) * rates)
    return torch.cat((turned.sin(), turned.cos()), -1)


class HeadfoldBartAttention(HeadfoldEncoderDecoderAttention):
    """Attention without positions of its own."""

    NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")

    def __init__(self, config: HeadfoldBartConfig, layer: int, heads: int, kv_heads: int) -> None:
        super().__init__(config, layer, heads, kv_heads, config.d_model // heads, bias=True)
        self.dropout = config.attention_dropout


class HeadfoldBartLayer(nn.Module):
    """Self-attention, cross-attention in the decoder, feed-forward."""

    def __init__(self, config: HeadfoldBartConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.decodes = config.is_decoder
        heads = config.decoder_attention_heads if self.decodes else config.encoder_attention_heads
        kv_heads = config.num_key_value_heads if self.decodes else config.encoder_num_key_value_heads
        inner = config.decoder_ffn_dim if self.decodes else config.encoder_ffn_dim
        self.self_attn = HeadfoldBartAttention(config, layer, heads, kv_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        if self.decodes:
            self.encoder_attn = HeadfoldBartAttention(config, layer, heads, kv_heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, inner)
        self.fc2 = nn.Linear(inner, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.act = ACT2FN[config.activation_function]

    def forward(
        self,
        states: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        memory: Tensor | None,
        memory_bias: Tensor | None,
        cache: Any,
        weights: bool,
    ) -> tuple[Any, ...]:
        """Return states, bias of self-attention, weights of self-attention and weights of cross-attention."""
        first, across = self.config.norms_first, None
        norm = self.self_attn_layer_norm
        made, bias, own = self.self_attn(norm(states) if first else states, mask, bias, None, cache, weights)
        states = self._added(states, made, norm)
        if self.decodes:
            norm = self.encoder_attn_layer_norm
            inner = norm(states) if first else states
            made, _, across = self.encoder_attn(inner, None, memory_bias, memory, cache, weights)
            states = self._added(states, made, norm)
        norm = self.final_layer_norm
        inner = self.act(self.fc1(norm(states) if first else states))
        made = self.fc2(F.dropout(inner, self.config.activation_dropout, self.training))
        states = self._added(states, made, norm)
        # as the sources do: infinities of float16 would become NaN in the next norm
        if states.dtype == torch.float16 and not self.decodes and not states.isfinite().all():
            limit = torch.finfo(states.dtype).max - 1000
            states = states.clamp(min=-limit, max=limit)
        return states, bias, own, across

    def _added(self, states: Tensor, made: Tensor, norm: nn.Module) -> Tensor:
        states = states + F.dropout(made, self.config.dropout, self.training)
        return states if self.config.norms_first else norm(states)


class HeadfoldBartPreTrainedModel(HeadfoldEncoderDecoderPreTrainedModel):
    """Settings of loading, and BART's fresh weights."""

    config_class = HeadfoldBartConfig
    base_model_prefix = "model"
    _no_split_modules = ["HeadfoldBartLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.init_std)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)


class HeadfoldBartStack(HeadfoldEncoderDecoderStack, HeadfoldBartPreTrainedModel):
    """The encoder or the decoder of BART."""

    LAYERS = "layers"

    def __init__(self, config: HeadfoldBartConfig, embedding: nn.Embedding) -> None:
        super().__init__(config)
        self._embedding = (embedding,)
        if config.positions == "table":
            self.embed_positions = HeadfoldBartPositions(config)
        elif config.positions not in ("waves", "waves_past_padding"):
            raise ValueError(f"positions is {config.positions}, which is not known")
        count = config.decoder_layers if config.is_decoder else config.encoder_layers
        self.layers = nn.ModuleList(HeadfoldBartLayer(config, layer) for layer in range(count))
        if config.embedding_norm:
            self.layernorm_embedding = nn.LayerNorm(config.d_model)
        if config.final_norm:
            self.layer_norm = nn.LayerNorm(config.d_model)
        self.layer_drop = config.decoder_layerdrop if config.is_decoder else config.encoder_layerdrop
        self.post_init()

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None, cache: Any) -> Tensor:
        if embeds is None:
            embeds = self._embedding[0](ids) * (self.config.d_model**0.5 if self.config.scale_embedding else 1.0)
        past = 0 if cache is None else cache.self_attention_cache.get_seq_length()
        position_BT = (torch.arange(embeds.shape[1], device=embeds.device) + past).expand(embeds.shape[:2])
        if self.config.positions == "table":
            position_BTC = self.embed_positions(position_BT)
        elif self.config.positions == "waves":
            position_BTC = sinusoids(position_BT, embeds.shape[-1], False)
        else:
            pad = self.config.pad_token_id
            real_BT = torch.ones_like(position_BT) if ids is None else ids.ne(pad).long()
            position_BTC = (
                sinusoids((real_BT.cumsum(1) + past) * real_BT + pad, embeds.shape[-1], True) * real_BT[..., None]
            )
        states = embeds + position_BTC.to(embeds)
        states = self.layernorm_embedding(states) if self.config.embedding_norm else states
        return F.dropout(states, self.config.dropout, self.training)

    def _finished(self, states: Tensor) -> Tensor:
        return self.layer_norm(states) if self.config.final_norm else states


class HeadfoldBartModel(nn.Module):
    """Encoder and decoder over one embedding."""

    def __init__(self, config: HeadfoldBartConfig) -> None:
        super().__init__()
        self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        encoder_config, decoder_config = copy.deepcopy(config), copy.deepcopy(config)
        encoder_config.is_decoder, decoder_config.is_decoder = False, True
        self.encoder = HeadfoldBartStack(encoder_config, self.shared)
        self.decoder = HeadfoldBartStack(decoder_config, self.shared)


class HeadfoldBartForConditionalGeneration(
    HeadfoldEncoderDecoderForConditionalGeneration, HeadfoldBartPreTrainedModel, GenerationMixin
):
    """BART with its output head."""

    DECODES_ITS_INPUT = True
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _keys_to_ignore_on_load_unexpected = [  # old files hold copies of the embedding, and tables of sinusoids
        r"(encoder|decoder)\.embed_tokens\.weight$",
        r"(encoder|decoder)\.embed_positions\.weights?$",
    ]

    def __init__(self, config: HeadfoldBartConfig) -> None:
        super().__init__(config)
        self.model = HeadfoldBartModel(config)
        if config.logits_bias:
            self.register_buffer("final_logits_bias", torch.zeros(1, config.vocab_size))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @property
    def _whole(self) -> Any:
        return self.model

    def _logits(self, states_BTC: Tensor) -> Tensor:
        logits_BTV = self.lm_head(states_BTC)
        return logits_BTV + self.final_logits_bias if self.config.logits_bias else logits_BTV

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        made = super().resize_token_embeddings(*arguments, **options)
        if self.config.logits_bias:
            bias: Tensor = self.get_buffer("final_logits_bias")
            room = made.weight.shape[0] - bias.shape[1]
            self.register_buffer("final_logits_bias", F.pad(bias, (0, room)))  # a negative room cuts
        return made


for _config, _model in (
    (HeadfoldT5Config, HeadfoldT5ForConditionalGeneration),
    (HeadfoldBartConfig, HeadfoldBartForConditionalGeneration),
):
    _config.register_for_auto_class()
    _model.register_for_auto_class("AutoModelForSeq2SeqLM")
