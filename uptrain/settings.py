"""Settings of an uptraining run: the command, recipes and the Python API all read this model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, field_validator

from ..local_paths import expanded
from ..settings import RARE, Flags, NoEffect, OffSwitch, Panel, RecordSettings, Tokens

Resume = Literal["auto", "always", "never"]
"""Treatment of an unfinished run.

``auto`` continues it if there is one, ``always`` fails if there is none, and ``never`` discards it.
"""

DISTILLATION = ("distillation_weight", "temperature", "divergence", "hidden_weight")
"""Fields that say how to learn from a teacher."""


def _one_or_several(value: Any) -> Any:
    """Take one name out of a list that holds no other: the record shows it as it was given."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


class UptrainSettings(RecordSettings):
    """Everything that determines the resulting weights, and how the run is watched and saved.

    The budget is one of ``tokens``, ``steps``, or ``fraction`` × ``pretraining_tokens`` (the paper's alpha).
    """

    data: Annotated[str | tuple[str, ...], BeforeValidator(_one_or_several), Panel("Text")] = Field(
        "stdlib",
        description="text to train on: stdlib, a text/jsonl/parquet file, or a datasets id; repeat it for a mixture, "
        "with weights as in a.jsonl=3",
    )
    fraction: Annotated[float | None, Panel("Budget")] = Field(
        None, gt=0, le=1, description="budget as uptraining tokens / pretraining tokens, the paper's alpha"
    )
    pretraining_tokens: Tokens | None = Field(
        None, description="tokens the source was pretrained on, such as 2e12; known for common checkpoints"
    )
    tokens: Tokens | None = Field(None, description="budget in tokens, instead of a fraction")
    steps: int | None = Field(None, gt=0, description="budget in optimizer steps, instead of tokens")

    sequence_length: int = Field(
        512,
        gt=1,
        validation_alias=AliasChoices("sequence_length", "block"),
        description="tokens of one packed sequence",
    )
    batch: int = Field(8, gt=0, description="sequences of one optimizer step, over all processes")
    micro_batch: int = Field(8, gt=0, description="sequences of one forward pass on one process")
    eval_data: Annotated[str | None, Panel("Watching and saving")] = Field(
        None, description="held-out text to score during the run"
    )
    eval_every: int = Field(
        0, ge=0, description="steps between two held-out evaluations; 0: at the start and the end only"
    )
    eval_tokens: int = Field(16384, gt=0, description="tokens of one held-out evaluation")
    save_every: int = Field(200, gt=0, description="steps between two saves that a run can resume from")

    learning_rate: Annotated[float, Panel("Learning"), Flags(("--learning-rate", "--lr"))] = Field(
        4e-4, gt=0, description="peak learning rate"
    )
    teacher: Annotated[str | None, OffSwitch("Learn from the text alone.")] = Field(
        "auto",
        description="checkpoint to distil from: a folder, an id, 'source' (the one converted from), or 'auto': the "
        "source if it is at hand",
    )
    distillation_weight: float = Field(1.0, ge=0, le=1, description="share of the KL divergence in the loss")
    train: Literal["all", "attention", "kv"] = Field("all", description="weights to train")

    # No fp16: it would need loss scaling, which the loss in chunks does not do.
    precision: Annotated[Literal["auto", "fp32", "bf16"], Panel("Devices")] = Field(
        "auto", description="precision of the forward pass; weights are kept in float32"
    )
    device: Literal["auto", "cpu"] = Field("auto", description="where to run; auto takes the GPU if there is one")
    gradient_checkpointing: bool = Field(
        False, description="save memory: compute activations again in the backward pass"
    )

    # Schedule, weight decay, betas and clipping are as in the pretraining of LLaMA (arXiv 2302.13971, §2.3).
    final_learning_rate: Annotated[float, Panel(RARE)] = Field(
        0.1, ge=0, le=1, description="learning rate at the last step, as a share of the peak"
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = Field(
        "cosine", description="course of the learning rate"
    )
    optimizer: Literal["adamw", "adafactor"] = Field(
        "adamw", description="optimizer; adafactor has a small state, and T5 was trained with it"
    )
    weight_decay: float = Field(0.1, ge=0, description="weight decay of matrices; norms, biases and vectors have none")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the mean squared gradient")
    max_grad_norm: float = Field(
        1.0,
        gt=0,
        validation_alias=AliasChoices("max_grad_norm", "clip"),
        description="largest norm of the gradient; a larger one is clipped",
    )
    spike: float = Field(
        3.0, ge=0, description="stop when the loss stays this many times above its recent median; 0: never"
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="rate of every dropout while training; default as in config.json"
    )
    temperature: float = Field(1.0, gt=0, description="divides the logits of teacher and student in the divergence")
    divergence: Literal["forward", "reverse"] = Field(
        "forward", description="KL(teacher || student) is forward, KL(student || teacher) is reverse"
    )
    hidden_weight: float = Field(
        0.0, ge=0, description="weight of the distance between hidden states of student and teacher"
    )
    isolate_documents: bool = Field(False, description="no attention across the documents of one sequence")
    compile: bool = Field(False, description="compile every layer with torch.compile; needs a compiler")
    liger: bool = Field(False, description="use liger-kernel's layers; needs CUDA")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the order of the text and of dropout")
    log_every: int = Field(10, gt=0, description="steps between two lines of progress")
    save_total_limit: int = Field(
        2, gt=0, validation_alias=AliasChoices("save_total_limit", "keep"), description="saves to keep"
    )
    tracker: tuple[str, ...] = Field(
        ("auto",),
        description="trackers: tensorboard, wandb, trackio, mlflow, …, or none; auto: tensorboard if installed",
    )

    PANELS: ClassVar[tuple[str, ...]] = ("Text", "Budget", "Learning", "Devices", "Watching and saving")
    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(DISTILLATION, lambda one: one.teacher is None, "there is no teacher", "name one with --teacher"),
        NoEffect(
            ("temperature", "divergence"),
            lambda one: one.distillation_weight == 0,
            "the divergence has no share in the loss",
            "give --distillation-weight above 0",
        ),
        NoEffect(
            ("eval_every", "eval_tokens"),
            lambda one: one.eval_data is None,
            "no held-out text is named",
            "add --eval-data",
        ),
        NoEffect(
            ("pretraining_tokens",),
            lambda one: one.fraction is None,
            "the budget is not given as a share of them",
            "give --fraction instead of --tokens or --steps",
        ),
        NoEffect(
            ("final_learning_rate",),
            lambda one: one.schedule == "constant",
            "a constant learning rate stays at its peak",
            "take another --schedule",
        ),
        NoEffect(
            ("beta1", "beta2"),
            lambda one: one.optimizer == "adafactor",
            "Adafactor keeps no mean gradient and has its own decay",
            "take --optimizer adamw",
        ),
        *RecordSettings.NO_EFFECT,
    )

    @field_validator("teacher")
    @classmethod
    def _whole_path(cls, teacher: str | None) -> str | None:
        # transformers does not know the sign for the home folder
        return str(expanded(teacher)) if teacher is not None and teacher.startswith("~") else teacher

    @property
    def corpora(self) -> tuple[str, ...]:
        """The corpora to train on, one or several, weights included."""
        return (self.data,) if isinstance(self.data, str) else self.data


# `--resume always` may change these as well: a run that diverged can go on more carefully. The record tells it.
ADJUSTABLE = frozenset({"learning_rate", "final_learning_rate", "max_grad_norm"})

# A resumed run may change how it is watched and saved, and how it computes the same thing.
FREE_ON_RESUME = frozenset(
    {
        "log_every", "save_every", "save_total_limit", "micro_batch", "device", "eval_data", "eval_every",
        "eval_tokens", "tracker", "spike", "gradient_checkpointing", "compile", "liger",
    }
)  # fmt: skip
