"""The commands `convert`, `check` and `inspect`: read options, call one function, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import console
from ..checkpoint.folder.hub import push, require_login
from ..errors import UsageError
from ..options import DryRun, Out, Overwrite, Revision, Source, Trust, numbers, path_option, with_settings
from .serving.devices import SIZES, STACKS, parallel_warnings, shown
from .settings import ConvertSettings

if TYPE_CHECKING:
    from .plan import Plan  # imports torch, which `--help` must not wait for

TargetTp = Annotated[
    int | None,
    typer.Option(
        "--target-tp", min=1, help="Devices you will serve on (tensor parallelism): warn if heads do not fit."
    ),
]


@with_settings("convert")
def convert(
    settings: ConvertSettings,
    checkpoint: Source,
    out: Out,
    target_tp: TargetTp = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="Upload the result to this repository when it is finished.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository private.")] = False,
    revision: Revision = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: Trust = False,
) -> None:
    """Turn a checkpoint into one with fewer KV heads.

    The result keeps its model type, so it runs in transformers and in engines that read the number of KV heads of that
    type. A type without such a setting is written as another type, which fewer engines run. --dry-run says where.

    Heads that are merged without text are a start for uptraining, not a usable model. With --calibration TEXT the heads
    are fitted to text, and the change of perplexity is measured on a part of it that is held out.

    Tensors that stay are copied byte for byte, so a checkpoint may be larger than memory. What headfold knows it cannot
    convert correctly is refused by name, and nothing of it is left.
    """
    if private and push_to_hub is None:
        raise UsageError("--private would change nothing: nothing is pushed.", "Leave it out, or add --push-to-hub.")
    _warn_about_devices(settings.groups, target_tp)
    if push_to_hub is not None and not dry_run:
        require_login(push_to_hub)
    from .run import plan_conversion, run_plan, say_where_it_runs, warn_about_quality, warn_about_source

    plan = plan_conversion(checkpoint, settings, revision=revision)
    if dry_run:
        show_plan(plan)
        plan.result.announce()
        warn_about_source(plan)
        say_where_it_runs(plan)
        warn_about_quality(plan)
        return
    run_plan(plan, out, overwrite=overwrite, trust_remote_code=trust_remote_code)
    console.result(out)
    if push_to_hub is not None:
        console.info(f"Pushed: {push(out, push_to_hub, private=private)}")


def show_plan(plan: Plan) -> None:
    """Print the table of ``--dry-run``."""
    shards = ("weight files", str(len(plan.source.headers)), str(len(plan.out_files())))
    title = f"Converting {plan.source.spec} by {plan.method_name}"
    console.table(title, ["", "source", "result"], [*plan.describe(), shards])


def _warn_about_devices(groups: int, devices: int | None) -> None:
    if devices is not None and groups > 0:
        for warning in parallel_warnings(groups, devices):
            console.warn(f"{warning}.")


def check(checkpoint: Source, revision: Revision = None) -> None:
    """Check that the config, the weight files and the model class of a checkpoint agree. No weight is read."""
    from .check import check_checkpoint

    found = check_checkpoint(checkpoint, revision=revision)
    for warning in found.warnings:
        console.warn(f"{warning}.")
    console.table(f"{checkpoint} is sound", ["", ""], found.rows)


def inspect(
    checkpoint: Source,
    groups: Annotated[
        str | None, typer.Option(help="Numbers of groups to predict the loss of, such as 8,4,2,1.")
    ] = None,
    statistics: Annotated[
        Path | None,
        path_option("--statistics", help="Statistics that `convert --calibration TEXT --statistics FILE` wrote."),
    ] = None,
    target_tp: TargetTp = None,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Describe a checkpoint, and the size of its KV cache at every number of groups. config.json is enough.

    With --groups and --statistics, predict for each layer the share of K and V energy that `folded` would lose.
    """
    if (groups is None) != (statistics is None):
        raise UsageError("Predicting the loss needs both --groups and --statistics.", "See `headfold inspect --help`.")
    if groups is not None and statistics is not None:
        _show_loss(checkpoint, revision, numbers(groups), statistics, as_json)
        return
    from .inspect import inspect_checkpoint

    sizes = sorted({*SIZES, *([target_tp] if target_tp else [])})
    found = inspect_checkpoint(checkpoint, revision=revision, device_counts=sizes)
    if as_json:
        console.data.print(found.to_json(), markup=False)
        return
    rows = [
        [
            str(row.groups),
            f"{row.bytes_per_token:,}"
            + (f" and {row.bytes_per_source_token:,} of the text read" if row.bytes_per_source_token else ""),
            console.human_bytes(row.bytes_per_1000_tokens),
            f"{row.share_of_source:.3g}",
            f"{row.queries_per_head}{' *' if row.slow_kernels else ''}",
            *(shown(row.devices[stack.name]) for stack in STACKS),
        ]
        for row in found.cache
    ]
    console.table(
        f"{checkpoint}: {found.model_type} ({found.model_class}), {console.counted(found.parameters, 'parameter')}, "
        f"{console.counted(found.attention_layers, 'layer')}, {console.counted(found.query_heads, 'query head')}, "
        f"{console.counted(found.kv_heads, 'KV head')} of width "
        f"{found.head_dim}, cache in {found.dtype}",
        ["groups", "KV bytes per token", "per 1,000 tokens", "of the source", "queries per KV head", *_STACK_COLUMNS],
        rows,
        markdown=not console.data.is_terminal,  # for a document, or for a person
    )
    console.data.print(found.route or found.runs, markup=False)
    console.data.print(_LEGEND, markup=False)
    for row in found.cache if target_tp else ():
        for warning in parallel_warnings(row.groups, target_tp or 1):
            console.warn(f"{warning}.")


_STACK_COLUMNS = tuple(f"{stack.name} on" for stack in STACKS)
_LEGEND = (
    "Last columns: numbers of devices that share the heads (tensor parallelism); in (parentheses), KV heads are kept "
    "several times. * no decoding kernel of its own in FlashInfer (vLLM, SGLang) or above 32 in XQA (TensorRT-LLM); "
    "see docs/serving.md."
)


def _show_loss(checkpoint: str, revision: str | None, groups: list[int], statistics: Path, as_json: bool) -> None:
    """Print a row per layer and a column per number of groups. Mark the layer that loses most at each."""
    import json
    from dataclasses import asdict

    from .inspect import predict_loss

    found = list(predict_loss(checkpoint, groups, statistics, revision=revision))
    if as_json:
        console.data.print(json.dumps([asdict(loss) for loss in found], indent=2), markup=False)
        return
    worst = {wanted: max((loss.total, loss.layer) for loss in found if loss.groups == wanted) for wanted in groups}
    rows = []
    for layer in sorted({loss.layer for loss in found}):
        here = {loss.groups: loss for loss in found if loss.layer == layer}
        cells = [f"{here[g].keys:.1%} {here[g].values:.1%}" + (" ←" if worst[g][1] == layer else "") for g in groups]
        rows.append([str(layer), *cells])
    console.table("Share of K and V energy lost (← most)", ["layer", *(f"G = {wanted}" for wanted in groups)], rows)
