"""One source type as data, and the reader that turns any of them into the neutral form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .decoder import LinearWeights, NeutralDecoder, NeutralLayer, NeutralSettings, TensorNames
from .reader import TensorReader

_USUAL_KEYS = {
    "vocabulary": "vocab_size",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
"""Field of :class:`NeutralSettings` → key of config.json. Config classes of transformers translate most older keys."""


@dataclass(frozen=True)
class SourceType:
    """One source type.

    Attributes:
        names: its tensors, by the names of its model class.
        dropouts: keys of config.json for dropout of embeddings, residuals and attention. None: it has none there.
        keys: field of the settings → key of config.json, where it is not the usual one.
        special: resolved config → fields of the settings that are not simply a key of config.json.
        split_qkv: (rows of the fused projection, heads, 0 for q, 1 for k or 2 for v) → rows of q, k or v.
        transposed: weights of the layers are stored as (inputs, outputs).
        unused_positions: rows in front of the table of positions that no position uses.
        adjust: (layer, resolved config, index) → the layer in the neutral form's order of rows and scale.
        demands: (test of the resolved config, the reason for refusing a config that fails it).
    """

    names: TensorNames
    dropouts: tuple[str | None, str | None, str | None]
    keys: Mapping[str, str] = field(default_factory=dict)
    special: Callable[[Any], dict[str, Any]] = lambda config: {}
    split_qkv: Callable[[Tensor, int, int], Tensor] | None = None
    transposed: bool = False
    unused_positions: int = 0
    adjust: Callable[[NeutralLayer, Any, int], NeutralLayer] = lambda layer, config, index: layer
    demands: Sequence[tuple[Callable[[Any], bool], str]] = ()

    def settings(self, config: Any) -> NeutralSettings:
        """Read the settings of a resolved config.

        Raises:
            UnsupportedError: the neutral form cannot express a setting.
        """
        special = self.special(config)
        keys = {name: key for name, key in {**_USUAL_KEYS, **self.keys}.items() if name not in special}
        shares = (0.0 if key is None else getattr(config, key) for key in self.dropouts)
        dropouts = dict(zip(("embedding", "residual", "attention"), shares, strict=True))
        fields: dict[str, Any] = {
            "rope": {},
            "dropouts": dropouts,
            **{name: getattr(config, key) for name, key in keys.items()},
        }
        fields |= special
        # GPT-2 and its relatives write null for the usual width of four times the hidden size.
        fields["inner"] = 4 * fields["hidden"] if fields["inner"] is None else fields["inner"]
        return NeutralSettings(**fields)

    def read(self, reader: TensorReader, settings: NeutralSettings) -> NeutralDecoder:
        """Read a checkpoint into the neutral form."""
        names = self.names
        table = None if names.positions is None else reader.tensor(f"{names.positions}.weight")
        projected = settings.embedding_width is not None
        return NeutralDecoder(
            settings=settings,
            embedding=reader.tensor(f"{names.embedding}.weight"),
            positions=None if table is None else table.then(lambda rows: rows[self.unused_positions :]),
            layers=tuple(self._layer(reader, settings, index) for index in range(settings.layers)),
            final_norm=reader.norm(names.final_norm) if settings.final_norm else None,
            head=reader.head(names.head),
            embedding_norm=None if names.embedding_norm is None else reader.norm(names.embedding_norm),
            project_in=reader.linear(names.project_in) if projected and names.project_in else None,
            project_out=reader.linear(names.project_out) if projected and names.project_out else None,
        )

    def _layer(self, reader: TensorReader, settings: NeutralSettings, index: int) -> NeutralLayer:
        names, at = self.names, self.names.layer.format(index)

        def linear(name: str) -> LinearWeights:
            found = reader.linear(f"{at}.{name}")
            return LinearWeights(found.weight.then(lambda w: w.T), found.bias) if self.transposed else found

        def projection(side: int) -> LinearWeights:
            split = self.split_qkv
            if split is None:
                return linear(names.qkv.format("qkv"[side]))
            return by_rows(linear(names.qkv), lambda rows: split(rows, settings.heads, side))

        q, k, v = (projection(side) for side in range(3))
        layer = NeutralLayer(
            attention_norm=reader.norm(f"{at}.{names.attention_norm}"),
            mlp_norm=None if names.mlp_norm is None else reader.norm(f"{at}.{names.mlp_norm}"),
            q=q,
            k=k,
            v=v,
            o=linear(names.o),
            up=linear(names.up),
            down=linear(names.down),
        )
        return self.adjust(layer, reader.config, index)


def by_rows(linear: LinearWeights, change: Callable[[Tensor], Tensor]) -> LinearWeights:
    """Apply ``change`` to the rows of weight and bias alike."""
    return LinearWeights(linear.weight.then(change), None if linear.bias is None else linear.bias.then(change))
