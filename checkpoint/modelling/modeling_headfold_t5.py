"""T5 with grouped-query attention: several query heads share one head of keys and values.

headfold wrote this file; it needs torch and transformers only. The function is that of T5 (Raffel et al. 2019, section
2.1: pre-norm without mean or bias, relative positions as biases of the scores, unscaled scores) with the sharing of
Ainslie et al. 2023, section 2.2: query heads j·n … (j+1)·n - 1 read KV head j. Parameters have T5's names.

Letters of shapes: B sequences, T queries, S keys, C width of the model, H query heads, G KV heads, D width of a head.
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
"""Versions of transformers (major.minor) with which this file was found to give the right numbers."""

_HERE = ".".join(transformers.__version__.split(".")[:2])
if _HERE not in TESTED:
    raise ImportError(
        f"this file was tested with transformers {' and '.join(TESTED)}, and this is {transformers.__version__}. "
        f'Install a tested one (pip install "transformers=={TESTED[-1]}.*").'
    )

_CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"
"""What this version of transformers calls the cache in the outputs."""


class HeadfoldT5Config(PretrainedConfig):
    """The settings of T5, and its numbers of KV heads.

    Args:
        num_key_value_heads: KV heads of the decoder, in self-attention and cross-attention; None: ``num_heads``.
        encoder_num_key_value_heads: of the encoder; None: ``num_heads``.
        dense_act_fn, is_gated_act: the feed-forward layer, which T5 tells by feed_forward_proj.
        scale_decoder_outputs: multiply what goes into the output head by d_model^-0.5, as models with a tied head do.
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
        """Of the decoder alone, with its own number of layers: caches are made by it."""
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
    """ReLU layer, or the gated one of T5 1.1."""

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
    """Bucket of each distance, key position less query position: half of them exact, half logarithmic."""
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


def attend(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias: Tensor | None, dropout: float, scale: float, weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention whose query heads share KV heads by neighbourhood; keys and values are not repeated in memory.

    Args:
        bias: added to the scores, broadcastable to (B, H, T, S).
        weights: give the attention weights (B, H, T, S), too.
    """
    batch, heads, queries, width = q_BHTD.shape
    groups, keys = k_BGSD.shape[1:3]
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


def forbidding(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to scores: nothing where it is true or 1, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask.bool(), torch.finfo(dtype).min)


def require_columns(mask: Tensor | None, keys: int) -> None:
    """Refuse a mask (B, S) that is not one of ``keys`` tokens.

    Raises:
        ValueError: it has too few columns, or too many.
    """
    if mask is not None and mask.dim() == 2 and mask.shape[1] != keys:
        raise ValueError(f"The attention mask must have a column for each of {keys} tokens, not {mask.shape[1]}.")


def refuse_unknown(given: dict[str, Any]) -> None:
    """Refuse to ignore what might change the numbers; what generation hands on beside that does not.

    Raises:
        ValueError: such a thing is given.
    """
    harmless = ("cache_position", "return_dict", "use_cache")
    unknown = sorted(name for name, value in given.items() if value is not None and name not in harmless)
    if unknown:
        raise ValueError(f"This model does not know {', '.join(unknown)}.")


class HeadfoldT5Attention(nn.Module):
    """Self-attention, or cross-attention where it is given the encoder's states."""

    def __init__(self, config: HeadfoldT5Config, layer: int, kv_heads: int, positions: bool) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.heads, self.kv_heads, self.width = config.num_heads, kv_heads, config.d_kv
        self.q = nn.Linear(config.d_model, self.heads * self.width, bias=False)
        self.k = nn.Linear(config.d_model, self.kv_heads * self.width, bias=False)
        self.v = nn.Linear(config.d_model, self.kv_heads * self.width, bias=False)
        self.o = nn.Linear(self.heads * self.width, config.d_model, bias=False)
        if positions:
            self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, self.heads)

    def forward(
        self,
        states_BTC: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        memory_BSC: Tensor | None = None,
        cache: Any = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(output (B, T, C), the bias of the scores for the layers that follow, attention weights where asked for).

        Args:
            mask: of the keys (B, S), or already (B, 1, T, S); only the first layer looks at it.
            bias: of the layer before; None in the first.
        """
        past = 0 if cache is None or memory_BSC is not None else cache.self_attention_cache.get_seq_length(self.layer)
        past = past.clone() if isinstance(past, Tensor) else past  # a static cache counts in place
        q = self._heads(self.q(states_BTC))
        k, v = self._keys_values(states_BTC, memory_BSC, cache, past)
        if bias is None and memory_BSC is None:
            bias = self._bias(q.shape[2], k.shape[2], past, mask, q)
        dropout = self.config.dropout_rate if self.training else 0.0
        made, shares = attend(q, k, v, bias, dropout, 1.0, weights)
        return self.o(made.transpose(1, 2).flatten(2)), bias, shares

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _keys_values(self, states: Tensor, memory: Tensor | None, cache: Any, past: Any) -> tuple[Tensor, Tensor]:
        """(B, G, S, D) each; those of the encoder's states are computed once and cached."""
        if memory is not None and cache is not None and cache.is_updated.get(self.layer):
            held = cache.cross_attention_cache.layers[self.layer]
            return held.keys, held.values
        source = states if memory is None else memory
        k, v = self._heads(self.k(source)), self._heads(self.v(source))
        if cache is None:
            return k, v
        place = torch.arange(k.shape[2], device=k.device) + past
        part = cache.self_attention_cache if memory is None else cache.cross_attention_cache
        k, v = part.update(k, v, self.layer, cache_kwargs={"cache_position": place})
        if memory is not None:
            cache.is_updated[self.layer] = True
        return k, v

    def _bias(self, queries: int, keys: int, past: Any, mask: Tensor | None, like: Tensor) -> Tensor:
        """Relative positions and masks, (1 or B, H, T, S)."""
        table, causal = self.relative_attention_bias, self.config.is_decoder
        position_T = torch.arange(queries, device=like.device)[:, None] + past
        distance_TS = torch.arange(keys, device=like.device)[None, :] - position_T
        count, farthest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        bias = table(buckets(distance_TS, not causal, count, farthest)).permute(2, 0, 1)[None].to(like.dtype)
        if mask is not None and mask.dim() == 4:  # made by generation: it says what is causal, too
            added = forbidding(mask, like.dtype) if mask.dtype == torch.bool else mask
            return bias + added[..., :keys]
        allowed = (distance_TS <= 0)[None, None] if causal else None
        if mask is not None:  # a static cache has room to spare, which no query reaches yet
            real = F.pad(mask.bool(), (0, keys - mask.shape[1]), value=True)[:, None, None]
            allowed = real if allowed is None else allowed & real
        return bias if allowed is None else bias + forbidding(allowed, like.dtype)


class HeadfoldT5Sublayer(nn.Module):
    """A norm and what reads it: attention under T5's name for it, or the feed-forward layer."""

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
        """(states, bias of self-attention, weights of self-attention, weights of cross-attention)."""
        states, bias, own = self.layer[0](states, mask, bias, None, cache, weights)
        across = None
        if self.decodes:
            states, _, across = self.layer[1](states, None, memory_bias, memory, cache, weights)
        return self.layer[-1](states)[0], bias, own, across


class HeadfoldT5PreTrainedModel(PreTrainedModel):
    """Loading that raises where transformers would warn, and T5's fresh weights."""

    config_class = HeadfoldT5Config
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeadfoldT5Block"]
    _keep_in_fp32_modules = ["wo"]
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, *arguments: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """As in transformers, but a missing or mismatched weight is an error and no random number.

        Raises:
            ValueError: there is one.
        """
        found: Any = super().from_pretrained(*arguments, output_loading_info=True, **options)
        model, report = found
        wrong = sorted({*map(str, report["missing_keys"]), *map(str, report["mismatched_keys"])})
        if wrong:
            raise ValueError(f"the checkpoint lacks {', '.join(wrong[:4])}, or has other shapes ({len(wrong)} weights)")
        return (model, report) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """T5's initialisation (as in its first code, which mesh tensorflow ran)."""
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


class HeadfoldT5Stack(HeadfoldT5PreTrainedModel):
    """The encoder or, where ``config.is_decoder``, the decoder."""

    def __init__(self, config: HeadfoldT5Config, embedding: nn.Embedding) -> None:
        super().__init__(config)
        self._embedding = (embedding,)  # in a tuple: it belongs to the model, so that it has one name on disk
        kv_heads = config.num_key_value_heads if config.is_decoder else config.encoder_num_key_value_heads
        layers = config.num_decoder_layers if config.is_decoder else config.num_layers
        self.block = nn.ModuleList(HeadfoldT5Block(config, layer, kv_heads) for layer in range(layers))
        self.final_layer_norm = HeadfoldT5LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.gradient_checkpointing = False
        self.post_init()

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
        """Hidden states after the last norm, of ids (B, T) or embeddings (B, T, C)."""
        refuse_unknown(others)
        if cache is not None and self.gradient_checkpointing and self.training:
            raise ValueError("Gradient checkpointing runs layers twice, so this model takes no cache while it trains.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds (of the decoder: decoder_input_ids and so on).")
        eager = self.config._attn_implementation == "eager"
        weights = bool(self.config.output_attentions if output_attentions is None else output_attentions)
        keep = bool(self.config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        states = self.dropout(self._embedding[0](input_ids) if inputs_embeds is None else inputs_embeds)
        if cache is None or not cache.self_attention_cache.is_compileable:  # of one of fixed size see _bias
            past = 0 if cache is None else cache.self_attention_cache.get_seq_length()
            require_columns(attention_mask, past + states.shape[1])
        memory_bias = None
        if encoder_hidden_states is not None and encoder_attention_mask is not None:
            require_columns(encoder_attention_mask, encoder_hidden_states.shape[1])
            memory_bias = forbidding(encoder_attention_mask[:, None, None], states.dtype)
        kept, bias = [states], None
        owns: list[Any] = []
        acrosses: list[Any] = []
        for block in self.block:
            arguments = (states, attention_mask, bias, encoder_hidden_states, memory_bias, cache, weights or eager)
            if self.gradient_checkpointing and self.training:
                states, bias, own, across = self._gradient_checkpointing_func(block.__call__, *arguments)
            else:
                states, bias, own, across = block(*arguments)
            kept, owns, acrosses = [*kept, states] if keep else kept, [*owns, own], [*acrosses, across]
        states = self.dropout(self.final_layer_norm(states))
        shown: dict[str, Any] = {"last_hidden_state": states}
        shown["hidden_states"] = (*kept[:-1], states) if keep else None
        shown["attentions"] = tuple(owns) if weights else None
        if not self.config.is_decoder:
            return BaseModelOutput(**shown)
        shown["cross_attentions"] = tuple(acrosses) if weights else None
        return BaseModelOutputWithPastAndCrossAttentions(**shown, **{_CACHE: cache})


class HeadfoldT5ForConditionalGeneration(HeadfoldT5PreTrainedModel, GenerationMixin):
    """Encoder, decoder and output head."""

    _tied_weights_keys = {"lm_head.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [  # copies of the embedding, and a bias that nobody reads, in old files
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

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.encoder

    def get_decoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: Any) -> None:
        self.shared = value
        self.encoder.set_input_embeddings(value)
        self.decoder.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The targets (B, T) moved by one, behind the start token."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError("config.json must have decoder_start_token_id and pad_token_id to train with labels.")
        shifted = labels.new_full(labels.shape, start)
        shifted[:, 1:] = labels[:, :-1]
        return shifted.masked_fill(shifted == -100, pad)

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
        """Logits (B, T, vocabulary), and the mean cross entropy of ``labels`` (B, T) where given; -100 is left out.

        Args:
            past_key_values, cache: two names of one thing, of transformers 4 and 5.
            num_items_in_batch: divide the summed loss by this instead of the number of targets.

        Raises:
            ValueError: something is given that the model does not know.
        """
        refuse_unknown(others)
        shown = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **shown)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        cache = past_key_values if cache is None else cache
        checkpointing = self.decoder.gradient_checkpointing and self.training
        if cache is None and not checkpointing and (self.config.use_cache if use_cache is None else use_cache):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_inputs_embeds,
            encoder_outputs.last_hidden_state,
            attention_mask,
            cache,
            **shown,
        )
        scale = self.config.d_model**-0.5 if self.config.scale_decoder_outputs else 1.0
        logits = self.lm_head(decoded.last_hidden_state * scale)
        output = Seq2SeqLMOutput(
            loss=None if labels is None else _loss(logits, labels, num_items_in_batch),
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


def _loss(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    targets = labels.flatten().to(logits.device)
    if count is None:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum") / count


HeadfoldT5Config.register_for_auto_class()
HeadfoldT5ForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
