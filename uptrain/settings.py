"""What a run of uptraining is told; the same model validates command line options and recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..corpus import Columns
from ..spans import MEAN_SPAN, NOISE_DENSITY

Resume = Literal["auto", "always", "never"]
"""``auto``: go on with an unfinished run, else begin; ``always``: go on or fail; ``never``: throw it away and begin."""


class UptrainSettings(BaseModel):
    """Everything that determines the resulting weights, and how the run is watched and saved.

    The budget is one of ``tokens``, ``steps``, or ``fraction`` × ``pretraining_tokens`` (the paper's alpha).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str | tuple[str, ...] = Field(
        "stdlib",
        description="corpus to train on: stdlib, a text/jsonl/parquet file, or a datasets id; several make a mixture, "
        "each with its weight: a.jsonl=3",
    )
    fraction: float | None = Field(
        None, gt=0, le=1, description="uptraining tokens / pretraining tokens, the paper's alpha"
    )
    pretraining_tokens: int | None = Field(
        None, gt=0, description="tokens the source was pretrained on; known for common checkpoints"
    )
    tokens: int | None = Field(None, gt=0, description="budget in tokens, instead of a fraction")
    steps: int | None = Field(None, gt=0, description="budget in optimizer steps, instead of tokens")

    sequence_length: int = Field(512, gt=1, description="tokens of one packed block")
    batch: int = Field(8, gt=0, description="blocks of one optimizer step, over all processes")
    micro_batch: int = Field(8, gt=0, description="blocks of one forward pass on one process")
    isolate_documents: bool = Field(False, description="no attention across the documents packed into one block")

    source_column: str = Field("text", description="of the records of --data: the text, what a model reads")
    target_column: str | None = Field(
        None, description="what an encoder-decoder is to write of it; without one it learns by span corruption"
    )
    noise_density: float = Field(
        NOISE_DENSITY, gt=0, lt=1, description="share of the tokens that span corruption cuts out"
    )
    mean_span: float = Field(MEAN_SPAN, ge=1, description="tokens of a span of span corruption, on average")

    train: Literal["all", "attention", "kv"] = Field(
        "all", description="which weights are trained: all, those of attention, or those of keys and values"
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="rate of every dropout while training; by default as config.json says"
    )
    optimizer: Literal["adamw", "adafactor"] = Field(
        "adamw", description="adamw, or adafactor as T5 was trained with, whose state is small"
    )
    learning_rate: float = Field(4e-4, gt=0, description="peak learning rate")
    final_learning_rate: float = Field(0.1, ge=0, le=1, description="share of the peak at the last step")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the learning rate rises")
    schedule: Literal["cosine", "linear", "constant", "warmup-stable-decay"] = "cosine"
    weight_decay: float = Field(0.1, ge=0, description="not applied to norms and biases")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0, description="largest norm of the gradient")
    spike: float = Field(
        3.0, ge=0, description="stop when the loss stays this many times above its recent median; 0: never"
    )

    teacher: str | None = Field(
        "auto",
        description="checkpoint to distil from: a folder, an id, 'source' (the one converted from), or 'auto': the "
        "source where it is at hand",
    )
    distillation_weight: float = Field(1.0, ge=0, le=1, description="share of the KL divergence in the loss")
    temperature: float = Field(1.0, gt=0, description="divides the logits of teacher and student in the divergence")
    divergence: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL(teacher || student); reverse: KL(student || teacher)"
    )

    hidden_weight: float = Field(
        0.0, ge=0, description="of the distance between the hidden states of student and teacher, layer by layer"
    )

    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the forward pass; weights are kept in float32"
    )
    device: Literal["auto", "cpu"] = "auto"
    gradient_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass instead of keeping them"
    )
    compile: bool = Field(False, description="torch.compile every layer; needs a compiler")
    liger: bool = Field(False, description="liger-kernel's kernels in the layers; on GPUs with CUDA")
    seed: int = Field(0, ge=0, lt=2**32)

    log_every: int = Field(10, gt=0, description="steps between two lines of progress")
    save_every: int = Field(200, gt=0, description="steps between two saves that a run can resume from")
    save_total_limit: int = Field(2, gt=0, description="saves to keep")
    eval_data: str | None = Field(None, description="held-out corpus to follow during the run")
    eval_every: int = Field(
        0, ge=0, description="steps between two held-out evaluations; 0: at the start and the end only"
    )
    eval_tokens: int = Field(16384, gt=0)
    tracker: tuple[str, ...] = Field(
        ("auto",),
        description="where metrics also go: tensorboard, wandb, trackio, mlflow, … as accelerate knows them; auto: "
        "tensorboard where it is installed; none",
    )

    @property
    def corpora(self) -> tuple[str, ...]:
        """The corpora to train on, one or several, weights included."""
        return (self.data,) if isinstance(self.data, str) else self.data

    @property
    def columns(self) -> Columns:
        """Of the records to train on."""
        return Columns(self.source_column, self.target_column)


# What `--resume always` may change besides: a run that diverged can go on more carefully. The record tells it.
ADJUSTABLE = frozenset({"learning_rate", "final_learning_rate", "max_grad_norm"})

# What may change when a run resumes: how it is watched and saved, and how it computes the same thing.
FREE_ON_RESUME = frozenset(
    {
        "log_every", "save_every", "save_total_limit", "micro_batch", "device", "eval_data", "eval_every",
        "eval_tokens", "tracker", "spike", "gradient_checkpointing", "compile", "liger",
    }
)  # fmt: skip
