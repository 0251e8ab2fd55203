"""BART and its kin with grouped-query attention: several query heads share one head of keys and values.

headfold wrote this file; it needs torch and transformers only. The function is that of BART (Lewis et al. 2019) and of
mBART, Marian, Pegasus and M2M-100, which differ in settings: where norms stand, and how positions are told. The sharing
is that of Ainslie et al. 2023, section 2.2: query heads j·n … (j+1)·n - 1 read KV head j. Parameters have the names of
those models.

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


class HeadfoldBartConfig(PretrainedConfig):
    """The settings of BART and its kin, and their numbers of KV heads.

    Args:
        num_key_value_heads: KV heads of the decoder, in self-attention and cross-attention; None: all query heads.
        encoder_num_key_value_heads: of the encoder; None: all query heads.
        norms_first: norms stand before attention and feed-forward layers (mBART, Pegasus, M2M-100), not behind.
        final_norm: a last norm in encoder and decoder.
        embedding_norm: a norm over the embedded text (BART, mBART).
        positions: ``table`` (one row each, of which the first ``position_offset`` are not used), ``waves`` (sines and
            cosines of Marian and Pegasus) or ``waves_past_padding`` (those of M2M-100, where padding has no position).
        logits_bias: a fixed bias is added to the logits.
        starts_with_last_token: targets are fed to the decoder behind their own last token (mBART's language), not
            behind decoder_start_token_id.
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


class HeadfoldBartPositions(nn.Embedding):
    """A row for each position, behind rows that nobody reads."""

    def __init__(self, config: HeadfoldBartConfig) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)
        self.offset = config.position_offset

    def forward(self, position_BT: Tensor) -> Tensor:
        return super().forward(position_BT + self.offset)


def waves(position_BT: Tensor, width: int, past_padding: bool) -> Tensor:
    """Sines, then cosines (Vaswani et al. 2017, section 3.5), (B, T, C); M2M-100 has another longest wave."""
    half = width // 2
    rates = torch.arange(half, dtype=torch.float64, device=position_BT.device) / (half - 1 if past_padding else half)
    turned = position_BT[..., None].double() * torch.exp(-math.log(10000.0) * rates)
    return torch.cat((turned.sin(), turned.cos()), -1)


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


class HeadfoldBartAttention(nn.Module):
    """Self-attention, or cross-attention where it is given the encoder's states."""

    def __init__(self, config: HeadfoldBartConfig, layer: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.width = config.d_model // heads
        self.q_proj = nn.Linear(config.d_model, heads * self.width)
        self.k_proj = nn.Linear(config.d_model, kv_heads * self.width)
        self.v_proj = nn.Linear(config.d_model, kv_heads * self.width)
        self.out_proj = nn.Linear(heads * self.width, config.d_model)

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
        q = self._heads(self.q_proj(states_BTC))
        k, v = self._keys_values(states_BTC, memory_BSC, cache, past)
        if bias is None and memory_BSC is None:
            bias = self._bias(q.shape[2], k.shape[2], past, mask, q)
        dropout = self.config.attention_dropout if self.training else 0.0
        made, shares = attend(q, k, v, bias, dropout, self.width**-0.5, weights)
        return self.out_proj(made.transpose(1, 2).flatten(2)), bias, shares

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _keys_values(self, states: Tensor, memory: Tensor | None, cache: Any, past: Any) -> tuple[Tensor, Tensor]:
        """(B, G, S, D) each; those of the encoder's states are computed once and cached."""
        if memory is not None and cache is not None and cache.is_updated.get(self.layer):
            held = cache.cross_attention_cache.layers[self.layer]
            return held.keys, held.values
        source = states if memory is None else memory
        k, v = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if cache is None:
            return k, v
        place = torch.arange(k.shape[2], device=k.device) + past
        part = cache.self_attention_cache if memory is None else cache.cross_attention_cache
        k, v = part.update(k, v, self.layer, cache_kwargs={"cache_position": place})
        if memory is not None:
            cache.is_updated[self.layer] = True
        return k, v

    def _bias(self, queries: int, keys: int, past: Any, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """What masks add to the scores, broadcastable to (B, H, T, S); None where everything is seen."""
        if mask is not None and mask.dim() == 4:  # made by generation: it says what is causal, too
            return (forbidding(mask, like.dtype) if mask.dtype == torch.bool else mask)[..., :keys]
        allowed = None
        if self.config.is_decoder:
            position_T = torch.arange(queries, device=like.device)[:, None] + past
            allowed = (torch.arange(keys, device=like.device)[None, :] <= position_T)[None, None]
        if mask is not None:  # a static cache has room to spare, which no query reaches yet
            real = F.pad(mask.bool(), (0, keys - mask.shape[1]), value=True)[:, None, None]
            allowed = real if allowed is None else allowed & real
        return None if allowed is None else forbidding(allowed, like.dtype)


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
        """(states, bias of self-attention, weights of self-attention, weights of cross-attention)."""
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
        if states.dtype == torch.float16 and not self.decodes and not states.isfinite().all():
            limit = torch.finfo(states.dtype).max - 1000
            states = states.clamp(min=-limit, max=limit)
        return states, bias, own, across

    def _added(self, states: Tensor, made: Tensor, norm: nn.Module) -> Tensor:
        states = states + F.dropout(made, self.config.dropout, self.training)
        return states if self.config.norms_first else norm(states)


class HeadfoldBartPreTrainedModel(PreTrainedModel):
    """Loading that raises where transformers would warn, and fresh weights."""

    config_class = HeadfoldBartConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HeadfoldBartLayer"]
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
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.init_std)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)


class HeadfoldBartStack(HeadfoldBartPreTrainedModel):
    """The encoder or, where ``config.is_decoder``, the decoder."""

    def __init__(self, config: HeadfoldBartConfig, embedding: nn.Embedding) -> None:
        super().__init__(config)
        self._embedding = (embedding,)  # in a tuple: it belongs to the model, so that it has one name on disk
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
        """Hidden states after the last layer (and norm), of ids (B, T) or embeddings (B, T, C)."""
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
            memory_bias = forbidding(encoder_attention_mask[:, None, None], states.dtype)
        drop = self.config.decoder_layerdrop if self.config.is_decoder else self.config.encoder_layerdrop
        kept, bias = [states], None
        owns: list[Any] = []
        acrosses: list[Any] = []
        for layer in self.layers:
            if self.training and drop > 0 and torch.rand(()) < drop:
                continue
            arguments = (states, attention_mask, bias, encoder_hidden_states, memory_bias, cache, weights or eager)
            if self.gradient_checkpointing and self.training:
                states, bias, own, across = self._gradient_checkpointing_func(layer.__call__, *arguments)
            else:
                states, bias, own, across = layer(*arguments)
            kept, owns, acrosses = [*kept, states] if keep else kept, [*owns, own], [*acrosses, across]
        states = self.layer_norm(states) if self.config.final_norm else states
        shown: dict[str, Any] = {"last_hidden_state": states}
        shown["hidden_states"] = (*kept[:-1], states) if keep else None
        shown["attentions"] = tuple(owns) if weights else None
        if not self.config.is_decoder:
            return BaseModelOutput(**shown)
        shown["cross_attentions"] = tuple(acrosses) if weights else None
        return BaseModelOutputWithPastAndCrossAttentions(**shown, **{_CACHE: cache})

    def _embedded(self, ids: Tensor | None, embeds: Tensor | None, cache: Any) -> Tensor:
        """Scaled embeddings and positions, (B, T, C)."""
        if embeds is None:
            embeds = self._embedding[0](ids) * (self.config.d_model**0.5 if self.config.scale_embedding else 1.0)
        past = 0 if cache is None else cache.self_attention_cache.get_seq_length()
        position_BT = (torch.arange(embeds.shape[1], device=embeds.device) + past).expand(embeds.shape[:2])
        if self.config.positions == "table":
            told = self.embed_positions(position_BT)
        elif self.config.positions == "waves":
            told = waves(position_BT, embeds.shape[-1], False)
        else:
            pad = self.config.pad_token_id
            real_BT = torch.ones_like(position_BT) if ids is None else ids.ne(pad).long()
            told = waves((real_BT.cumsum(1) + past) * real_BT + pad, embeds.shape[-1], True) * real_BT[..., None]
        states = embeds + told.to(embeds)
        states = self.layernorm_embedding(states) if self.config.embedding_norm else states
        return F.dropout(states, self.config.dropout, self.training)


class HeadfoldBartModel(nn.Module):
    """Encoder and decoder over one embedding."""

    def __init__(self, config: HeadfoldBartConfig) -> None:
        super().__init__()
        self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        encoder_config, decoder_config = copy.deepcopy(config), copy.deepcopy(config)
        encoder_config.is_decoder, decoder_config.is_decoder = False, True
        self.encoder = HeadfoldBartStack(encoder_config, self.shared)
        self.decoder = HeadfoldBartStack(decoder_config, self.shared)


class HeadfoldBartForConditionalGeneration(HeadfoldBartPreTrainedModel, GenerationMixin):
    """Encoder, decoder and output head."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _keys_to_ignore_on_load_unexpected = [  # copies of the embedding, and tables of waves, in old files
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

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.model.encoder

    def get_decoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.model.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self.model.shared

    def set_input_embeddings(self, value: Any) -> None:
        self.model.shared = value
        self.model.encoder.set_input_embeddings(value)
        self.model.decoder.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        made = super().resize_token_embeddings(*arguments, **options)
        if self.config.logits_bias:
            bias: Tensor = self.get_buffer("final_logits_bias")
            room = made.weight.shape[0] - bias.shape[1]
            self.register_buffer("final_logits_bias", F.pad(bias, (0, room)))  # a negative room cuts
        return made

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The targets (B, T) moved by one, behind the start token or, for mBART, behind their last one."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if pad is None or (start is None and not self.config.starts_with_last_token):
            raise ValueError("config.json must have decoder_start_token_id and pad_token_id to train with labels.")
        labels = labels.masked_fill(labels == -100, pad)
        shifted = labels.roll(1, dims=1)
        if self.config.starts_with_last_token:
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
            encoder_outputs = self.model.encoder(input_ids, attention_mask, inputs_embeds, **shown)
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            given = input_ids if labels is None else labels
            decoder_input_ids = None if given is None else self.prepare_decoder_input_ids_from_labels(given)
        cache = past_key_values if cache is None else cache
        checkpointing = self.model.decoder.gradient_checkpointing and self.training
        if cache is None and not checkpointing and (self.config.use_cache if use_cache is None else use_cache):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoded = self.model.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            decoder_inputs_embeds,
            encoder_outputs.last_hidden_state,
            attention_mask,
            cache,
            **shown,
        )
        logits = self.lm_head(decoded.last_hidden_state)
        if self.config.logits_bias:
            logits = logits + self.final_logits_bias
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


HeadfoldBartConfig.register_for_auto_class()
HeadfoldBartForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
