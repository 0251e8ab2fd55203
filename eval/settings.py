"""Settings of a comparison: the command, recipes and the Python API all read this model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ..settings import RARE, Counts, Names, NoEffect, Panel, ReadByModel, RecordSettings


def _zero_means_all(value: Any) -> Any:
    """Read ``--tokens 0`` as the whole text: a command line has no null."""
    return None if value == "0" else value


class EvalSettings(RecordSettings):
    """Everything that the numbers depend on besides the checkpoints."""

    data: Annotated[str, Panel("Text")] = Field(
        "stdlib", description="text never trained on: stdlib, a text/jsonl/parquet file, or a datasets id"
    )
    tokens: Annotated[int | None, Panel("Scoring"), BeforeValidator(_zero_means_all), ReadByModel()] = Field(
        65_536, gt=0, description="tokens to score; 0: the whole text"
    )
    window: int | None = Field(
        None, gt=1, description="tokens that a model sees at once; default 512 or the model's own limit"
    )
    stride: int | None = Field(None, gt=0, description="tokens between two windows; default half a window")
    batch: int = Field(8, gt=0, description="windows of one forward pass")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the models; auto: the dtype of the source's weights, float32 on a CPU"
    )
    # a string and not a choice: torch knows more devices than could be listed
    device: str = Field("auto", description="where to run: auto, cpu, cuda, …")

    repeats: Annotated[int, Panel("Decoding speed and memory")] = Field(
        6, ge=0, description="timings of each point, the models in turn; 0: no timing"
    )
    contexts: Counts | None = Field(
        None, description="prompt lengths to decode after; default 64,256 on a CPU, else 256,1024,4096"
    )
    decode_batches: Counts = Field((1, 8), description="sequences decoded side by side, one timing each")
    new_tokens: int = Field(32, gt=0, description="tokens decoded in one timing")
    memory: str | None = Field(
        None, description="memory of the device to serve from, such as 24GB, to say how much context fits"
    )

    needles: Annotated[int, Panel("Retrieval and tasks")] = Field(
        8, ge=0, description="passages hidden for retrieval, per length; 0: none"
    )
    needle_lengths: Counts | None = Field(
        None, description="tokens of the text around them; default a quarter of the model's limit, and all of it"
    )
    tasks: Names = Field((), description="tasks of lm-eval: names, or YAML files and folders of your own")
    shots: int | None = Field(None, ge=0, description="examples shown before each question; default the task's own")
    task_limit: int | None = Field(None, gt=0, description="questions per task; default all")

    source_cache: Annotated[str | None, Panel(RARE)] = Field(
        None, description="folder that keeps the source's scores; found there, the source is not run: no KL, no speed"
    )
    bos: bool | None = Field(None, description="begin documents with BOS; default as the tokenizer does")

    PANELS: ClassVar[tuple[str, ...]] = ("Text", "Scoring", "Decoding speed and memory", "Retrieval and tasks")
    NO_EFFECT: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            ("decode_batches", "new_tokens"),
            lambda one: one.repeats == 0,
            "decoding is not timed",
            "give --repeats above 0",
        ),
        NoEffect(
            ("contexts",),
            lambda one: one.repeats == 0 and one.memory is None,
            "decoding is not timed, and no --memory is asked about",
            "give --repeats above 0",
        ),
        NoEffect(("needle_lengths",), lambda one: one.needles == 0, "no passages are hidden", "give --needles"),
        NoEffect(("shots", "task_limit"), lambda one: not one.tasks, "no tasks are named", "add --tasks"),
        *RecordSettings.NO_EFFECT,
    )
