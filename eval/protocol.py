"""How every model of one comparison is run: what the settings ask for, fitted to what the models can do."""

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
from .measures.kv_cache import DecodeSettings
from .measures.retrieval import NeedleSettings, default_lengths, fitting
from .models import Subject, shared_vocab
from .scoring.limits import choose_dtype, choose_window, has_learned_positions, position_limit
from .scoring.targets import Asking, target_text
from .scoring.windows import TokenText, default_stride, tokenize_text
from .settings import EvalSettings

_CPU_CONTEXTS, _CONTEXTS = (64, 256), (256, 1024, 4096)
_WITHOUT_ENCODER = ("stride", "bos", "memory", "needles", "needle_lengths", "tasks", "shots", "task_limit")
"""Settings that mean nothing for models with one."""


@dataclass(frozen=True)
class Protocol:
    """What must be the same for the numbers to be comparable.

    Attributes:
        limit: tokens that all the models were made for, None where nothing says so.
        vocab: ids that all distributions are over, None for all that the models have.
        memory: bytes of the device to serve from, None where nobody asked.
        asking: what encoder-decoders are to write; None for models without an encoder.
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
    asking: Asking | None = None

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def reading(self) -> dict[str, Any]:
        """All that a model's scores depend on besides the model and the text, as JSON values."""
        return {
            "window": self.window,
            "stride": self.stride,
            "dtype": self.dtype_name,
            "device": self.device.type,
            "vocab": self.vocab,
            "needle": asdict(self.needle),
            **({"asking": self.asking.describe()} if self.asking else {}),
        }

    def tokenize(self, tokenizer: Any, corpus: Iterable[Document], settings: EvalSettings) -> TokenText:
        """The tokens to score, as this tokenizer has them."""
        if self.asking is None:
            return tokenize_text(tokenizer, corpus, max_tokens=settings.tokens, bos=settings.bos)
        return target_text(tokenizer, corpus, self.asking, max_tokens=settings.tokens)


def settle(settings: EvalSettings, subjects: Sequence[Subject], device: torch.device) -> Protocol:
    """Fit the settings to the models, the source first.

    Raises:
        UsageError: a window that runs beyond a model's table of positions, an unknown dtype, no size of memory.
    """
    tokenizer = subjects[0].tokenizer()
    stated = [position_limit(subject.config, tokenizer) for subject in subjects]
    limit = min((found for found in stated if found is not None), default=None)
    too_long = settings.window is not None and limit is not None and settings.window > limit
    window = choose_window(settings.window, limit, too_long and _has_learned_positions(subjects[0]))
    asking = _asking(settings, subjects[0], window)
    dtype = choose_dtype(settings.dtype, subjects[0].config, device)
    if dtype == torch.float16 and subjects[0].config.model_type.endswith("t5"):
        warn("What T5 computes overflows float16; take --dtype bfloat16 or float32 if numbers are not finite.")
    if asking is not None:
        _warn_of_unused(settings)
    asked = default_stride(window) if settings.stride is None else settings.stride
    lengths = settings.needle_lengths
    needle = NeedleSettings(settings.needles, default_lengths(limit) if lengths is None else tuple(sorted(lengths)))
    return Protocol(
        device=device,
        dtype=dtype,
        window=window,
        stride=min(asked, window - 1) if asking is None else window,
        batch_size=settings.batch,
        limit=limit,
        vocab=shared_vocab(subjects),
        decode=_decoding(settings, limit, device),
        needle=fitting(needle, limit) if asking is None else NeedleSettings(0, ()),
        memory=None if settings.memory is None else parse_bytes(settings.memory, "memory"),
        asking=asking,
    )


def _asking(settings: EvalSettings, source: Subject, window: int) -> Asking | None:
    column, spans = settings.target_column is not None, (settings.noise_density, settings.mean_span)
    if source.writes and column and spans != (NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            "--noise-density and --mean-span would change nothing: with a target column no spans are cut out.",
            "Leave them out, or leave --target-column out.",
        )
    if source.writes:
        return Asking(window, column, *spans)
    if column or spans != (NOISE_DENSITY, MEAN_SPAN):
        raise UsageError(
            f"{source.name} has no encoder, so it is asked for no targets.",
            "Leave out --target-column, --noise-density and --mean-span.",
        )
    return None


def _warn_of_unused(settings: EvalSettings) -> None:
    """Say which of the settings that were changed are for models without an encoder."""
    fields = EvalSettings.model_fields
    changed = [name for name in _WITHOUT_ENCODER if getattr(settings, name) != fields[name].default]
    unused = [name for name in changed if (name, getattr(settings, name)) != ("needles", 0)]
    if unused:
        options = ", ".join("--" + name.replace("_", "-") for name in unused)
        warn(f"Not used, since these are encoder-decoders: {options}.")


def _has_learned_positions(source: Subject) -> bool:
    skeleton = load_language_model(source.folder, device_map="meta", trust_remote_code=source.trust_remote_code)
    return has_learned_positions(skeleton)


def _decoding(settings: EvalSettings, limit: int | None, device: torch.device) -> DecodeSettings:
    """Prompts that leave room for the new tokens within the limit; two that become one count once."""
    default = _CPU_CONTEXTS if device.type == "cpu" else _CONTEXTS
    new_tokens = settings.new_tokens if limit is None else max(1, min(settings.new_tokens, limit // 2))
    longest = None if limit is None else limit - new_tokens
    asked = settings.contexts or default
    contexts = {context if longest is None else min(context, longest) for context in asked}
    return DecodeSettings(tuple(sorted(contexts)), tuple(settings.decode_batches), new_tokens, settings.repeats)
