"""A decoder-only language model in which several query heads share one key and value head.

headfold writes it where the class of the source cannot hold fewer KV heads. GPT-2, OPT, GPT-Neo, BLOOM and MPT differ
in few things, and each of those is a setting here. The file needs torch and transformers, nothing else.

Letters of shapes: B sequences, T tokens that are read now, S tokens that keys come from (the cached ones, then those
read now), H query heads, G KV heads, D head dim, C hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

TESTED = ("4.57", "5.24")
"""Versions of transformers (major.minor) in which this file was found to compute the right numbers."""
_VERSION = ".".join(transformers.__version__.split(".")[:2])
if _VERSION not in TESTED:
    raise ImportError(
        f"this model's code was tested with transformers {' and '.join(TESTED)}, not with "
        f'{transformers.__version__}. Install one of these (pip install "transformers=={TESTED[-1]}.*").'
    )

_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the cache in the outputs of this version of transformers."""


class HeadfoldDecoderConfig(PretrainedConfig):
    """Settings of the decoder.

    Args:
        intermediate_size: width of the MLP.
        num_key_value_heads: number of KV heads. None: as many as query heads.
        score_scale: factor of the attention scores. None: one over the square root of the head dim.
        learned_positions: add a table of position embeddings to the token embeddings.
        positions_from_mask: padding takes no position, if no ``position_ids`` are given.
        alibi_slopes: ALiBi slope of every query head. None: nothing is added to the scores.
        alibi_in_model_dtype: round ALiBi's biases to the dtype of the model before they are added, as BLOOM does.
        attention_windows: number of tokens that each layer sees, None for all. None instead of a list: all see all.
        clip_qkv: clamp queries, keys and values to this size.
        embedding_size: width of the embeddings. None: the hidden size.
        embedding_norm: a norm follows the embeddings.
        norms_first: norms precede attention and MLP; else they follow.
        final_norm: a norm precedes the output head.
        qkv_bias, output_bias, mlp_bias, norm_bias: which layers have biases.
    """

    model_type = "headfold_decoder"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50257,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        hidden_act: str = "gelu_new",
        max_position_embeddings: int = 1024,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        score_scale: float | None = None,
        learned_positions: bool = True,
        positions_from_mask: bool = False,
        alibi_slopes: list[float] | None = None,
        alibi_in_model_dtype: bool = False,
        attention_windows: list[int | None] | None = None,
        clip_qkv: float | None = None,
        embedding_size: int | None = None,
        embedding_norm: bool = False,
        norms_first: bool = True,
        final_norm: bool = True,
        qkv_bias: bool = True,
        output_bias: bool = True,
        mlp_bias: bool = True,
        norm_bias: bool = True,
        embedding_dropout: float = 0.0,
        residual_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.score_scale = score_scale
        self.learned_positions = learned_positions
        self.positions_from_mask = positions_from_mask
        self.alibi_slopes = alibi_slopes
        self.alibi_in_model_dtype = alibi_in_model_dtype
        self.attention_windows = attention_windows
        self.clip_qkv = clip_qkv
        self.embedding_size = hidden_size if embedding_size is None else embedding_size
        self.embedding_norm = embedding_norm
        self.norms_first = norms_first
        self.final_norm = final_norm
        self.qkv_bias = qkv_bias
        self.output_bias = output_bias
        self.mlp_bias = mlp_bias
        self.norm_bias = norm_bias
        self.embedding_dropout = embedding_dropout
        self.residual_dropout = residual_dropout
        self.attention_dropout = attention_dropout
        self.use_cache = use_cache
        kwargs.pop("head_dim", None)  # config.json has it for whoever sizes a cache, but the other settings imply it
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **kwargs})
        if hidden_size % num_attention_heads or num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{num_attention_heads} query heads must divide the hidden size ({hidden_size}) and be a multiple of "
                f"the KV heads ({self.num_key_value_heads})."
            )

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer sees. None: all."""
        return None if self.attention_windows is None else self.attention_windows[layer]


class HeadfoldDecoderAttention(nn.Module):
    """Attention of H query heads to G KV heads: query head i uses KV head i // (H/G)."""

    def __init__(self, config: HeadfoldDecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 if config.score_scale is None else config.score_scale
        self.clip_qkv = config.clip_qkv
        self.dropout = config.attention_dropout
        width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.output_bias)

    def forward(self, x_BTC: Tensor, bias_BHTS: Tensor | None, cache: Any = None) -> Tensor:
        """Attend. ``bias_BHTS`` is added to the scores, its B and H may be 1. None stands for a causal mask."""
        q_BHTD, k_BGTD, v_BGTD = (self._heads(part(x_BTC)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            k_BGTD, v_BGTD = cache.update(k_BGTD, v_BGTD, self.layer)
        out_BHTD = self._attend(q_BHTD, k_BGTD, v_BGTD, bias_BHTS)
        return self.o_proj(out_BHTD.transpose(1, 2).flatten(2))

    def _heads(self, x_BTC: Tensor) -> Tensor:
        if self.clip_qkv is not None:
            x_BTC = x_BTC.clamp(-self.clip_qkv, self.clip_qkv)
        return x_BTC.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def _attend(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_BHTS: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = q_BHTD.shape
        groups = k_BGSD.shape[1]
        if bias_BHTS is not None and bias_BHTS.dtype != q_BHTD.dtype:  # under autocast
            bias_BHTS = bias_BHTS.clamp(min=torch.finfo(q_BHTD.dtype).min).to(q_BHTD.dtype)
        if tokens == 1:
            # one new token: the queries of a group become rows of it, so that no key is repeated
            q_BHTD = q_BHTD.reshape(batch, groups, heads // groups, -1)
            if bias_BHTS is not None and bias_BHTS.shape[1] > 1:
                bias_BHTS = bias_BHTS.reshape(-1, groups, heads // groups, bias_BHTS.shape[-1])
        else:
            k_BGSD, v_BGSD = (part.repeat_interleave(heads // groups, 1) for part in (k_BGSD, v_BGSD))
        out = functional.scaled_dot_product_attention(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            attn_mask=bias_BHTS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=bias_BHTS is None and tokens > 1,
            scale=self.scale,
        )
        return out.reshape(batch, heads, tokens, -1)


class HeadfoldDecoderMLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: HeadfoldDecoderConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the same shape."""
        return self.fc2(self.act(self.fc1(x_BTC)))


class HeadfoldDecoderLayer(GradientCheckpointingLayer):
    """Attention, then MLP, each added to its input."""

    def __init__(self, config: HeadfoldDecoderConfig, layer: int) -> None:
        super().__init__()
        self.norms_first = config.norms_first
        self.self_attn = HeadfoldDecoderAttention(config, layer)
        self.mlp = HeadfoldDecoderMLP(config)
        self.input_layernorm = _norm(config, config.hidden_size)
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, h_BTC: Tensor, bias_BHTS: Tensor | None = None, cache: Any = None) -> Tensor:
        """See :class:`HeadfoldDecoderAttention`."""
        if self.norms_first:
            h_BTC = h_BTC + self.dropout(self.self_attn(self.input_layernorm(h_BTC), bias_BHTS, cache))
            return h_BTC + self.dropout(self.mlp(self.post_attention_layernorm(h_BTC)))
        h_BTC = self.input_layernorm(h_BTC + self.dropout(self.self_attn(h_BTC, bias_BHTS, cache)))
        return self.post_attention_layernorm(h_BTC + self.dropout(self.mlp(h_BTC)))


def _norm(config: HeadfoldDecoderConfig, width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.norm_bias)


class HeadfoldDecoderPreTrainedModel(PreTrainedModel):
    """Raises where transformers would only warn that weights are missing."""

    config_class = HeadfoldDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["HeadfoldDecoderLayer"]
    _skip_keys_device_placement = ["cache"]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but refuse missing and mismatched weights instead of filling in random numbers.

        Raises:
            ValueError: a weight is missing or has another shape.
        """
        found: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, report = found
        wrong = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
        if wrong:
            raise ValueError(
                f"the weight files do not fit config.json: {len(wrong)} tensors are missing or have another shape, "
                f"{wrong[0]} for one."
            )
        return (model, report) if output_loading_info else model


class HeadfoldDecoderModel(HeadfoldDecoderPreTrainedModel):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: HeadfoldDecoderConfig) -> None:
        super().__init__(config)
        wide, hidden = config.embedding_size, config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, wide)
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, hidden) if config.learned_positions else None
        )
        self.project_in = nn.Linear(wide, hidden, bias=False) if wide != hidden else None
        self.embed_norm = _norm(config, hidden) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList([HeadfoldDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = _norm(config, hidden) if config.final_norm else None
        self.project_out = nn.Linear(hidden, wide, bias=False) if wide != hidden else None
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states (B, T, C).

        Args:
            attention_mask: (B, S), 0 where there is padding.
            position_ids: (B, T) or (1, T).
            past_key_values, cache: names of the same cache in transformers 4 and 5.

        Raises:
            ValueError: the model does not know an argument, or does not support it.
        """
        _refuse_odd_requests(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        h_BTC = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        past = 0 if cache is None else int(cache.get_seq_length())
        if attention_mask is not None and attention_mask.shape[1:] != (past + h_BTC.shape[1],):
            raise ValueError(f"attention_mask must have a column for each of {past + h_BTC.shape[1]} tokens.")
        positions_BS = self._positions(attention_mask, past + h_BTC.shape[1], h_BTC.device)
        h_BTC = self._embedded(h_BTC, positions_BS[:, past:] if position_ids is None else position_ids)
        windows = {self.config.window(layer) for layer in range(len(self.layers))}
        biases = {window: self._bias(h_BTC, attention_mask, positions_BS, past, window) for window in windows}
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        seen = []
        for index, layer in enumerate(self.layers):
            seen += [h_BTC] if wanted else []
            h_BTC = layer(h_BTC, bias_BHTS=biases[self.config.window(index)], cache=cache)
        h_BTC = h_BTC if self.norm is None else self.norm(h_BTC)
        seen += [h_BTC] if wanted else []
        h_BTC = h_BTC if self.project_out is None else self.project_out(h_BTC)
        return BaseModelOutputWithPast(
            last_hidden_state=h_BTC, hidden_states=tuple(seen) if wanted else None, **{_CACHE: cache}
        )

    def _cache(self, given: Any, wanted: bool | None) -> Any:
        """Return the cache that was given, a new one if one is wanted, or None."""
        if given is not None and getattr(given, "is_compileable", False):
            raise ValueError("This model takes a cache that grows (DynamicCache), none of a fixed size.")
        if self.gradient_checkpointing and self.training:
            if given is not None:
                raise ValueError(
                    "Gradient checkpointing runs layers twice, so this model takes no cache while it trains."
                )
            return None
        wanted = self.config.use_cache if wanted is None else wanted
        return DynamicCache(config=self.config) if wanted and given is None else given

    def _positions(self, mask_BS: Tensor | None, length: int, device: torch.device) -> Tensor:
        """Return the position of every token, cached ones included, (B, S) or (1, S), counted from 0."""
        if mask_BS is None or not self.config.positions_from_mask:
            return torch.arange(length, device=device)[None]
        mask_BS = mask_BS.long()
        return ((mask_BS.cumsum(1) - 1) * mask_BS).clamp(min=0)

    def _embedded(self, h_BTC: Tensor, positions_BT: Tensor) -> Tensor:
        if self.project_in is not None:
            h_BTC = self.project_in(h_BTC)
        if self.embed_positions is not None:
            h_BTC = h_BTC + self.embed_positions(positions_BT)
        if self.embed_norm is not None:
            h_BTC = self.embed_norm(h_BTC)
        return self.dropout(h_BTC)

    def _bias(
        self, h_BTC: Tensor, mask_BS: Tensor | None, positions_BS: Tensor, past: int, window: int | None
    ) -> Tensor | None:
        """Return the bias of the scores, (B or 1, H or 1, T, S). None: a plain causal mask will do."""
        tokens, length = h_BTC.shape[1], positions_BS.shape[1]
        padding_BS = None if mask_BS is None or bool(mask_BS.all()) else mask_BS == 0
        reach = length if window is None else min(window, length)
        slopes = self.config.alibi_slopes
        if slopes is None and padding_BS is None and reach == length and (past == 0 or tokens == 1):
            return None
        back_TS = torch.arange(past, length, device=h_BTC.device)[:, None] - torch.arange(length, device=h_BTC.device)
        hidden_BHTS = ((back_TS < 0) | (back_TS >= reach))[None, None]
        if padding_BS is not None:
            hidden_BHTS = hidden_BHTS | padding_BS[:, None, None]
        added_BHTS = h_BTC.new_zeros(1, 1, 1, 1) if slopes is None else self._alibi(h_BTC, positions_BS, past)
        # not minus infinity: the softmax of a row of padding, which sees nothing, would be NaN
        smallest = torch.finfo(h_BTC.dtype).min
        return added_BHTS.masked_fill(hidden_BHTS, smallest)

    def _alibi(self, h_BTC: Tensor, positions_BS: Tensor, past: int) -> Tensor:
        """Linear biases (Press et al. 2022, arXiv 2108.12409), (B or 1, H, T, S).

        Only differences within a row matter. They are taken before rounding, so that near tokens have exact ones.
        """
        slopes_H = torch.tensor(self.config.alibi_slopes, dtype=torch.float32, device=h_BTC.device)
        bias_BHS = slopes_H[:, None] * positions_BS[:, None]
        if self.config.alibi_in_model_dtype:
            bias_BHS = bias_BHS.to(h_BTC.dtype).float()
        return (bias_BHS[:, :, None] - bias_BHS[:, :, past:, None]).to(h_BTC.dtype)


class HeadfoldDecoderForCausalLM(HeadfoldDecoderPreTrainedModel, GenerationMixin):
    """The model with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HeadfoldDecoderConfig) -> None:
        super().__init__(config)
        self.model = HeadfoldDecoderModel(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, V), and the loss if there are ``labels``, which are shifted here.

        Args:
            num_items_in_batch: divide the summed loss by this instead of the number of targets.
        """
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cache=past_key_values if cache is None else cache,
            **kwargs,
        )
        scored = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(found.last_hidden_state[:, scored])
        loss = None
        if labels is not None:
            sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits_BTV, labels=labels, **sizes)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, hidden_states=found.hidden_states, **{_CACHE: getattr(found, _CACHE)}
        )


_HARMLESS = ("output_attentions", "return_dict", "cache_position")
"""Arguments that change no number, and those that are checked before."""


def _refuse_odd_requests(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError("This model does not keep its attention weights (output_attentions).")
    if kwargs.get("return_dict") is False:
        raise ValueError("This model returns its outputs by name (return_dict=True), not as a tuple.")
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise ValueError(f"This model does not know {', '.join(unknown)}.")


HeadfoldDecoderConfig.register_for_auto_class()
HeadfoldDecoderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
