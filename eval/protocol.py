"""Decide how every model of one comparison is run: the user's settings, fitted to what the models can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checkpoint.load import load_language_model
from ..console import parse_bytes, warn
from ..corpus import Document
from ..errors import UsageError
from ..spans import MEAN_SPAN, NOISE_DENSITY
from .measures.retrieval import default_lengths, drop_long_texts
from .models import ComparedModel, shared_vocab
from .results import DecodeSettings, NeedleSettings
from .scoring.limits import choose_dtype, choose_window, has_learned_positions, position_limit
from .scoring.targets import TargetSettings, target_text
from .scoring.windows import TokenText, default_stride, tokenize_text
from .settings import EvalSettings

# Longer prompts would take minutes on a CPU.
_CPU_CONTEXTS, _CONTEXTS = (64, 256), (256, 1024, 4096)
_WITHOUT_ENCODER = ("stride", "bos", "memory", "needles", "needle_lengths", "tasks", "shots", "task_limit")
"""Settings that have no effect on encoder-decoders."""


@dataclass(frozen=True)
class EvalProtocol:
    """Everything that must be the same for the numbers to be comparable.

    Attributes:
        limit: tokens that all the models were made for, None where no config says.
        vocab: ids that all distributions are over, None for all that the models have.
        memory: bytes of the device to serve from, None where the user named none.
        targets: what encoder-decoders write (None for models without an encoder).
    """

    device: torch.device
    dtype: torch.dtype
    window: int
    stride: int
    batch_size: int
    limit: int | None
    vocab: int | None
    decode: DecodeSettings
    needle: NeedleSettings
    memory: int | None
    targets: TargetSettings | None = None

    @property
    def dtype_name(self) -> str:
        """The dtype as users write it, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def identity(self) -> dict[str, Any]:
        """Collect all that a model's scores depend on besides the model and the text, as JSON values."""
        return {
            "window": self.window,
            "stride": self.stride,
            "dtype": self.dtype_name,
            "device": self.device.type,
            "vocab": self.vocab,
            "needle": asdict(self.needle),
            **({"targets": self.targets.describe()} if self.targets else {}),
        }

    def tokenize(self, tokenizer: Any, corpus: Iterable[Document], settings: EvalSettings) -> TokenText:
        """Make the tokens to score with one model's tokenizer."""
        if self.targets is None:
            return tokenize_text(tokenizer, corpus, max_tokens=settings.tokens, bos=settings.bos)
        return target_text(tokenizer, corpus, self.targets, max_tokens=settings.tokens)


def fit_protocol(settings: EvalSettings, models: Sequence[ComparedModel], device: torch.device) -> EvalProtocol:
    """Fit the settings to the models, the source first.

    Raises:
        UsageError: a window that runs beyond a model's table of positions, or an invalid memory size.
    """
    source = models[0]
    limit = _shortest_limit(models)
    window = _window(settings, source, limit)
    targets = _targets(settings, source, window)
    dtype = choose_dtype(settings.dtype, source.config, device)
    if dtype == torch.float16 and source.config.model_type.endswith("t5"):
        warn("T5's activations overflow float16; use --dtype bfloat16 or float32 if numbers are not finite.")
    if targets is not None:
        _warn_of_unused(settings)
    stride = default_stride(window) if settings.stride is None else settings.stride
    return EvalProtocol(
        device=device,
        dtype=dtype,
        window=window,
        # the first token of a window has no context to be predicted from, so windows overlap by one token at least
        stride=min(stride, window - 1) if targets is None else window,
        batch_size=settings.batch,
        limit=limit,
        vocab=shared_vocab(models),
        decode=_decode_settings(settings, limit, device),
        needle=_needle_settings(settings, limit) if targets is None else NeedleSettings(0, ()),
        memory=None if settings.memory is None else parse_bytes(settings.memory, "memory"),
        targets=targets,
    )


def _shortest_limit(models: Sequence[ComparedModel]) -> int | None:
    # one stands for all, since models with other tokenizers are refused
    tokenizer = models[0].tokenizer()
    stated = [position_limit(model.config, tokenizer) for model in models]
    return min((found for found in stated if found is not None), default=None)


def _window(settings: EvalSettings, source: ComparedModel, limit: int | None) -> int:
    too_long = settings.window is not None and limit is not None and settings.window > limit
    # building the model's skeleton takes seconds, so it is built only where the answer matters
    return choose_window(settings.window, limit, too_long and _has_learned_positions(source))


def _targets(settings: EvalSettings, source: ComparedModel, window: int) -> TargetSettings | None:
    column, spans = settings.target_column is not None, (settings.noise_density, settings.mean_span)
    # again, because model_copy checks nothing
    if source.is_encoder_decoder and column and spans != (NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            "--noise-density and --mean-span would change nothing: with a target column no spans are cut out.",
            "Leave them out, or leave --target-column out.",
        )
    if source.is_encoder_decoder:
        return TargetSettings(window, column, *spans)
    if column or spans != (NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            f"{source.name} has no encoder, so it cannot be scored on targets.",
            "Leave out --target-column, --noise-density and --mean-span.",
        )
    return None


def _warn_of_unused(settings: EvalSettings) -> None:
    """Name the changed settings that have no effect on encoder-decoders."""
    fields = EvalSettings.model_fields
    changed = [name for name in _WITHOUT_ENCODER if getattr(settings, name) != fields[name].default]
    # 0 switches retrieval off, as happens here anyway
    unused = [name for name in changed if (name, getattr(settings, name)) != ("needles", 0)]
    if unused:
        options = ", ".join("--" + name.replace("_", "-") for name in unused)
        warn(f"Not used, since these are encoder-decoders: {options}.")


def _has_learned_positions(source: ComparedModel) -> bool:
    skeleton = load_language_model(source.folder, device_map="meta", trust_remote_code=source.trust_remote_code)
    return has_learned_positions(skeleton)


def _needle_settings(settings: EvalSettings, limit: int | None) -> NeedleSettings:
    lengths = settings.needle_lengths
    needle = NeedleSettings(settings.needles, default_lengths(limit) if lengths is None else tuple(sorted(lengths)))
    return drop_long_texts(needle, limit)


def _decode_settings(settings: EvalSettings, limit: int | None, device: torch.device) -> DecodeSettings:
    """Shorten prompts so that the new tokens fit within the limit. Prompts that become equal are timed once."""
    default = _CPU_CONTEXTS if device.type == "cpu" else _CONTEXTS
    # at least half of the limit is for the prompt
    new_tokens = settings.new_tokens if limit is None else max(1, min(settings.new_tokens, limit // 2))
    longest = None if limit is None else limit - new_tokens
    wanted = settings.contexts or default
    contexts = {context if longest is None else min(context, longest) for context in wanted}
    return DecodeSettings(tuple(sorted(contexts)), tuple(settings.decode_batches), new_tokens, settings.repeats)
