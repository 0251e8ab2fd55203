"""The commands `convert` and `inspect`: read options, call one function, print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .. import console
from ..checkpoint.hub import push, require_login
from ..checkpoint.source import Checkpoint
from ..errors import UsageError
from ..options import DryRun, Overwrite, Source, Trust, numbers
from .early import convert_early, foresee, worth_it
from .serving import SIZES, STACKS, parallel_warnings, shown

TargetTp = Annotated[
    int | None,
    typer.Option("--target-tp", min=1, help="Devices you will serve on (tensor parallelism): say what that means."),
]


def convert(
    checkpoint: Source,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write. It appears whole or not at all.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option("--groups", "-g", help="KV heads of the result; divides those of the source.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="How a group becomes one head: mean, first, random, aligned or folded. "
            "Default: folded where calibration text is given, else mean."
        ),
    ] = None,
    grouping: Annotated[
        str | None,
        typer.Option(
            help="Which heads form a group: contiguous (neighbours) or similarity. "
            "Default: similarity for folded, where heads may change places."
        ),
    ] = None,
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Of an encoder-decoder, convert the encoder as well as the decoder.")
    ] = False,
    rescale: Annotated[
        bool, typer.Option("--rescale", help="With aligned: give the averaged head the mean norm of its members.")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option(help="Text the method may look at; never the text you will evaluate on.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="Tokens of that text to read.")] = 131_072,
    sequence_length: Annotated[
        int,
        typer.Option(
            "--sequence-length",
            "--block",
            min=1,
            help="Tokens of one block of that text; best as many as the model will read at once.",
        ),
    ] = 512,
    statistics: Annotated[
        Path | None, typer.Option(help="File to keep the statistics of the text in, or to take them from.")
    ] = None,
    refine: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Training steps per layer that fit each block to the source; 0 for none. "
            "Default: 200 for folded where calibration text is given.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where calibration and refinement run: cpu, cuda, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the method random, and of the order of the text in refinement.")] = 0,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Size of the weight files, such as 5GB. Default: as the source has them.")
    ] = None,
    target_tp: TargetTp = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO_ID", help="Upload the result to this repository when it is finished.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make that repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Convert nothing: check that config, weight files and model class agree.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    trust_remote_code: Trust = False,
) -> None:
    """Turn a checkpoint into one with fewer KV heads, ready for transformers, vLLM, SGLang and llama.cpp.

    Tensors that stay are copied byte for byte, so a checkpoint may be larger than memory. Anything that cannot be
    converted correctly is refused by name, and nothing of it is left.
    """
    if check:
        _check(checkpoint, revision)
        return
    if groups is None or out is None:
        raise UsageError("A conversion needs --groups and --out.", "For example: --groups 8 -o OUT; or --check alone.")
    if rescale:
        method = _rescaled(method)
    if refine and not calibration:
        raise UsageError("Refinement fits to text, and there is none.", "Name some: --calibration stdlib, or a file.")
    _warn_about_devices(groups, target_tp)
    if push_to_hub is not None and not dry_run:
        require_login(push_to_hub)
    shard = None if max_shard_size is None else console.parse_bytes(max_shard_size, "shard")
    looks_at_text = calibration is not None or statistics is not None
    source = Checkpoint.open(checkpoint, revision=revision)
    foreseen = foresee(source, groups, method or "mean", grouping or "contiguous", shard)
    if foreseen and worth_it(source) and not (dry_run or looks_at_text or encoder):
        chosen = method or "mean"
        convert_early(
            source, out, foreseen, groups=groups, method=chosen, max_shard_bytes=shard, overwrite=overwrite, seed=seed
        )
        _finish(out, push_to_hub, private)
        return
    from .plan import default_method
    from .run import plan_conversion, run_plan, say_what_is_odd

    method = method or default_method(looks_at_text=looks_at_text)
    plan = plan_conversion(source, groups=groups, method=method, grouping=grouping, encoder=encoder)
    plan = replace(plan, max_shard_bytes=shard)
    if dry_run:
        shards = ("weight files", str(len(source.headers)), str(len(plan.out_files())))
        console.table(f"Converting {checkpoint} by {method}", ["", "source", "result"], [*plan.describe(), shards])
        say_what_is_odd(plan)
        return
    if looks_at_text and not refine and not plan.rewrites_queries:
        console.warn(f"{method} looks at no text, so --calibration and --statistics change nothing.")
    if looks_at_text:
        from .calibrated import Calibration, convert_calibrated

        text = Calibration(calibration, calibration_tokens, sequence_length, refine, statistics, device)
        convert_calibrated(plan, out, text, overwrite=overwrite, seed=seed, trust_remote_code=trust_remote_code)
    else:
        if method == "folded":
            console.warn("folded without calibration text can be worse than mean; add --calibration TEXT.")
        run_plan(plan, out, overwrite=overwrite, seed=seed)
    _finish(out, push_to_hub, private)


def _rescaled(method: str | None) -> str:
    if method != "aligned":
        raise UsageError("--rescale belongs to --method aligned.", "Leave it out, or add --method aligned.")
    return "aligned+rescale"


def _finish(out: Path, repo_id: str | None, private: bool) -> None:
    """Push where that is asked for; the path of the result is the last line."""
    console.result(out)
    if repo_id is not None:
        console.info(f"Pushed: {push(out, repo_id, private=private)}")


def _warn_about_devices(groups: int, devices: int | None) -> None:
    if devices is not None and groups > 0:
        for warning in parallel_warnings(groups, devices):
            console.warn(f"{warning}.")


def _check(checkpoint: str, revision: str | None) -> None:
    from .check import check_checkpoint

    found = check_checkpoint(checkpoint, revision=revision)
    for warning in found.warnings:
        console.warn(f"{warning}.")
    console.table(f"{checkpoint} is sound", ["", ""], found.rows)


def inspect(
    checkpoint: Source,
    groups: Annotated[
        str | None, typer.Option(help="Numbers of groups to predict the damage of, such as 8,4,2,1.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(help="Statistics that `convert --calibration TEXT --statistics FILE` wrote.")
    ] = None,
    target_tp: TargetTp = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is, and what its KV cache would be at every number of groups. config.json is enough.

    With --groups and --statistics: the share of K and V energy that `folded` would lose in each layer.
    """
    if (groups is None) != (statistics is None):
        raise UsageError("Predicting damage needs both --groups and --statistics.", "See `headfold inspect --help`.")
    if groups is not None and statistics is not None:
        _show_damage(checkpoint, revision, numbers(groups), statistics, as_json)
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
        f"{checkpoint}: {found.model_type} ({found.model_class}), {found.parameters:,} parameters, "
        f"{found.attention_layers} layers, {found.query_heads} query heads, {found.kv_heads} KV heads of width "
        f"{found.head_dim}, cache in {found.dtype}",
        ["groups", "KV bytes per token", "per 1,000 tokens", "of the source", "queries per KV head", *_STACK_COLUMNS],
        rows,
        markdown=True,
    )
    if found.route:
        console.data.print(found.route, markup=False)
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


def _show_damage(checkpoint: str, revision: str | None, groups: list[int], statistics: Path, as_json: bool) -> None:
    """A row a layer, a column a number of groups; the layer that loses most at each is marked."""
    import json
    from dataclasses import asdict

    from .inspect import predict_damage

    found = list(predict_damage(checkpoint, groups, statistics, revision=revision))
    if as_json:
        console.data.print(json.dumps([asdict(damage) for damage in found], indent=2), markup=False)
        return
    worst = {
        wanted: max((damage.total, damage.layer) for damage in found if damage.groups == wanted) for wanted in groups
    }
    rows = []
    for layer in sorted({damage.layer for damage in found}):
        here = {damage.groups: damage for damage in found if damage.layer == layer}
        cells = [f"{here[g].keys:.1%} {here[g].values:.1%}" + (" ←" if worst[g][1] == layer else "") for g in groups]
        rows.append([str(layer), *cells])
    console.table("Share of K and V energy lost (← most)", ["layer", *(f"G = {wanted}" for wanted in groups)], rows)
