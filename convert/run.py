"""Carry out a plan: headers first, then bytes, then the merged heads layer by layer. The folder appears whole."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.card import write_card
from ..checkpoint.digest import in_background
from ..checkpoint.folder.side_files import announce
from ..checkpoint.modelling import write_code
from ..checkpoint.publish import claiming, publishing, refuse_overlap
from ..checkpoint.record import named_source, write_record
from ..checkpoint.source import CONFIG_NAME, Checkpoint
from ..checkpoint.write import ShardWriter, copy_side_files, require_space
from ..console import counted, info, progress, warn
from ..errors import UsageError
from ..local_paths import expanded
from ..settings import validated
from .calibration.calibrate import (
    new_statistics,
    refuse_missing_device,
    refuse_statistics_inside,
    saved_statistics,
)
from .calibration.quality import (
    CONVERTED,
    REFINED,
    HeldOutCheck,
    Quality,
    exact,
    from_saved_statistics,
    not_asked_for,
    too_little_text,
)
from .calibration.source_model import SourceModel
from .calibration.statistics import Statistics
from .calibration.text import CalibrationText, read_text
from .family.verify import verify
from .methods.context import MethodContext
from .plan import Plan, make_plan
from .refinement.resume import RefinementFolder, remove_refinement_folder
from .refinement.start import Refinement, fit_settings, refinement_steps, settled
from .rewrites.materialise import loadable
from .settings import ConvertSettings

_RESERVE_BYTES = 64 * 2**20


def convert_checkpoint(
    source: str | Path,
    out: str | Path,
    settings: ConvertSettings | None = None,
    *,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    measure: bool = True,
    **fields: Any,
) -> Path:
    """Turn a checkpoint with K KV heads into one with G.

    A refinement that was killed continues after its last finished layer when the call is repeated: its work lies in
    ``OUT.refinement`` until ``out`` is published.

    Args:
        source: a folder or a hub id (then with ``revision``).
        out: the folder to write; it appears only when everything is done and checked.
        settings: groups, method, calibration text and so on. Or give its fields as keywords: ``groups=8``.
        overwrite: replace an output folder that is there.
        trust_remote_code: run Python code that comes with the checkpoint, where text is read.
        measure: measure the change on held-out calibration text, and say what the result is good for; False for a
            caller who measures the result.

    Returns:
        ``out``.

    Raises:
        HeadfoldError: of one of its kinds, with nothing written.
    """
    plan = plan_conversion(source, settings, revision=revision, **fields)
    return run_plan(plan, expanded(out), overwrite=overwrite, trust_remote_code=trust_remote_code, measure=measure)


def plan_conversion(
    source: str | Path | Checkpoint,
    settings: ConvertSettings | None = None,
    *,
    revision: str | None = None,
    **fields: Any,
) -> Plan:
    """Decide what :func:`convert_checkpoint` does, and write nothing: this is ``--dry-run``."""
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source, revision=revision)
    return make_plan(checkpoint, settings_from(settings, fields))


def settings_from(settings: ConvertSettings | None, fields: dict[str, Any]) -> ConvertSettings:
    """Take settings as they are, or make them from keywords.

    Raises:
        UsageError: a keyword that is no field, a value that does not fit, or both settings and keywords.
    """
    if settings is None:
        made: ConvertSettings = validated(ConvertSettings, fields, "convert")
        return made
    if fields:
        raise UsageError("Settings and single fields were given together.", "Give one of the two.")
    return settings


def run_plan(
    plan: Plan, out: Path, *, overwrite: bool = False, trust_remote_code: bool = False, measure: bool = True
) -> Path:
    """Execute ``plan``, as described at :func:`convert_checkpoint`."""
    refuse_overlap(plan.source.folder, out)
    with claiming(out, overwrite=overwrite):
        plan.result.announce()
        if measure:
            say_where_it_runs(plan)
        if plan.settings.looks_at_text:
            quality = _execute_with_text(
                plan, out, overwrite=overwrite, trust_remote_code=trust_remote_code, measure=measure
            )
        else:
            quality = _execute(plan, out, _Prepared(plan.without_text), overwrite=overwrite)
    if measure and plan.changes:
        quality.say()
    return out


def _execute_with_text(plan: Plan, out: Path, *, overwrite: bool, trust_remote_code: bool, measure: bool) -> Quality:
    """Execute a plan whose settings name text, or statistics of text."""
    settings = plan.settings
    refuse_statistics_inside(settings.statistics, out, plan.source.folder)
    refuse_missing_device(settings.device)
    text = read_text(plan.source, settings, trust_remote_code=trust_remote_code)
    refinement = _refinement(plan, out, text, trust_remote_code)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headfold-")))
        plan = plan.reading(stack.enter_context(loadable(plan.source, out)))
        model = SourceModel(plan.source, settings.device, scratch / "offload", trust_remote_code=trust_remote_code)
        layers = plan.family.layers
        statistics = saved_statistics(plan.source, settings, text, len(layers)) if plan.reads_text else None
        if refinement is not None:
            refinement = settled(refinement, model, requested=settings.refine is not None)
        if plan.reads_text and statistics is None:
            statistics = new_statistics(model, layers, settings, text, scratch)
        check = _held_out_check(plan, text, model, trust_remote_code) if measure else None
        # The merge needs this memory, and refinement loads the source anew.
        model.release()
        otherwise = _unmeasured(settings) if measure else not_asked_for()
        quality = _execute(plan, out, _Prepared(otherwise, statistics, refinement, check), overwrite=overwrite)
    if refinement is not None and refinement.work.exists():
        remove_refinement_folder(refinement.work)
    return quality


def _held_out_check(
    plan: Plan, text: CalibrationText | None, model: SourceModel, trust_remote_code: bool
) -> HeldOutCheck | None:
    """Measure the source on held-out text; None where nothing changes, or there is no such text."""
    if not plan.changes or text is None or text.held_out_BT is None:
        return None
    tokenizer = model.tokenizer() if plan.model_type.is_encoder_decoder else None
    check = HeldOutCheck(text, tokenizer, plan.settings.device, trust_remote_code=trust_remote_code)
    check.measure_source(model)
    return check


def _refinement(plan: Plan, out: Path, text: CalibrationText | None, trust_remote_code: bool) -> Refinement | None:
    """Prepare the refinement that the settings ask for, or return None."""
    settings = plan.settings
    steps = refinement_steps(settings, plan.model_type)
    if not plan.changes or steps == 0 or text is None:
        return None
    conversion = {"number of groups": plan.groups, "method": plan.method_name, "grouping": plan.grouping}
    return Refinement(
        plan.family.layers,
        text,
        fit_settings(steps, settings.seed, text),
        RefinementFolder.beside(out),
        conversion,
        settings.device,
        trust_remote_code,
    )


@dataclass(frozen=True)
class _Prepared:
    """What was prepared before a plan is executed.

    Attributes:
        otherwise: what to say of the quality of the result without a ``check``.
    """

    otherwise: Quality
    statistics: Statistics | None = None
    refinement: Refinement | None = None
    check: HeldOutCheck | None = None


def _execute(plan: Plan, out: Path, prepared: _Prepared, *, overwrite: bool) -> Quality:
    """Write the result beside its place, check it, and rename it."""
    require_space(out, plan.weight_bytes + _RESERVE_BYTES)
    with (
        publishing(out, overwrite=overwrite) as folder,
        in_background(plan.result.original.digest) as source_digest,
        ShardWriter(folder, plan.out_files()) as writer,
    ):
        writer.create()
        entry, quality = _fill_folder(plan, folder, writer, prepared)
        digest = source_digest()
        write_record(folder, plan.source.folder, {**entry, "source_digest": digest}, {digest: plan.source.folder})
        write_card(folder)
    return quality


def _fill_folder(plan: Plan, folder: Path, writer: ShardWriter, prepared: _Prepared) -> tuple[dict[str, Any], Quality]:
    """Write all but record and card into an output folder whose weight files ``writer`` has created.

    Returns:
        The entry of the record, and the quality of the result.
    """
    warn_about_source(plan)
    if writer.sharded:
        writer.write_index()
    copy_side_files(plan.source, folder)
    (folder / CONFIG_NAME).write_bytes(plan.config_text.encode("utf-8"))
    write_code(json.loads(plan.config_text), folder)
    plan.result.finish(folder)
    # Names and shapes stand now, the weights do not: a disagreement costs no time.
    unused = verify(folder).names
    loses_nothing = write_weights(plan, writer, prepared.statistics)
    refined, quality = _refine_and_measure(plan, folder, prepared, loses_nothing=loses_nothing)
    entry = {**_entry(plan, prepared.statistics, unused), "refinement": refined, "quality": quality.record()}
    return entry, quality


def _refine_and_measure(
    plan: Plan, folder: Path, prepared: _Prepared, *, loses_nothing: bool
) -> tuple[dict[str, Any] | None, Quality]:
    """Refine the weights in ``folder`` if that was prepared: its entry for the record, and the quality of the result.

    Args:
        loses_nothing: the merge was exact.
    """
    refinement, check = prepared.refinement, prepared.check
    if check is not None:
        check.measure(CONVERTED, folder)
    refined = None if refinement is None else refinement.run(plan.source, folder)
    if check is not None and refined is not None:
        check.measure(REFINED, folder)
    if not plan.changes:
        return refined, exact("No KV heads were merged")
    if check is not None:
        return refined, check.quality()
    if loses_nothing and refined is None:
        return refined, exact("The heads of each group are equal")
    return refined, prepared.otherwise


def _unmeasured(settings: ConvertSettings) -> Quality:
    """Say why nothing is measured although the settings name text or statistics."""
    if settings.calibration is not None:
        return too_little_text(settings.calibration)
    assert settings.statistics is not None
    return from_saved_statistics(settings.statistics)


def say_where_it_runs(plan: Plan) -> None:
    """Say in which engines the result runs, unless it is its source."""
    if plan.changes or plan.result.record()["rewrite"] is not None:
        plan.where.say()


def warn_about_quality(plan: Plan) -> None:
    """Say before a conversion if nobody will know how good its result is."""
    if plan.changes and not plan.settings.looks_at_text:
        plan.without_text.say()


def write_weights(plan: Plan, writer: ShardWriter, statistics: Statistics | None) -> bool:
    """Copy what stays and, meanwhile, compute what changes, one layer at a time.

    Returns:
        True if the merge loses nothing, because the heads of each group are equal in every layer.
    """
    # Copying waits for the disk and merging for the CPU, so the two overlap.
    writer.start_copying()
    layers, loses_nothing = plan.result.changed_layers, True
    with progress(plan.method_name, len(layers)) as advance, torch.no_grad():
        for layer in layers:
            # No text reaches a layer that the class ignores on loading.
            moment = None if statistics is None or layer.ignored else statistics.second_moment(layer.layer)
            context = MethodContext(layer.layer, plan.settings.seed, plan.family.initializer_range, moment)
            # Most checkpoints answer at the first layer, so the heads of one layer are read twice.
            loses_nothing = loses_nothing and plan.result.merges_equal_heads(layer, plan.method, plan.grouping, context)
            for name, tensor in plan.result.new_tensors(layer, plan.method, plan.grouping, context).items():
                writer.put(name, tensor)
            advance()
    computed = [name for name, action in plan.actions.items() if action.kind == "compute"]
    with progress(f"rewriting as {plan.model_type.name}", len(computed)) as advance, torch.no_grad():
        for name in computed:
            writer.put(name, plan.source.read(name))
            advance()
    with progress("copying", writer.bytes_to_copy) as advance:
        writer.finish(advance)
    return loses_nothing


def warn_about_source(plan: Plan) -> None:
    """Tell the user about oddities before anything is written."""
    for note in plan.source.notes:
        warn(f"{plan.source.folder}: {note}.")
    for note in plan.family.notes if plan.changes else ():
        warn(f"{note}.")
    announce(plan.source.folder, plan.source.left_out)
    if not plan.changes:
        copied = all(action.kind == "copy" for action in plan.actions.values())
        kept = "every tensor is copied as it is" if copied else "no KV head is merged"
        info(f"The source has {counted(plan.groups, 'KV head')} already: {kept}.")


def _entry(plan: Plan, statistics: Statistics | None, unused: list[str]) -> dict[str, Any]:
    """Make the entry of headfold.json for this conversion."""
    notes = plan.notes
    if unused:
        notes.append(f"tensors that the model class does not use: {', '.join(unused)}")
    return {
        "step": "convert",
        **named_source(plan.source.folder),
        **plan.result.record(),
        "serving": asdict(plan.where),
        "method": plan.method_name,
        "grouping": plan.grouping,
        "turned": plan.turns(),
        "statistics": None if statistics is None else statistics.metadata,
        "seed": plan.settings.seed,
        "settings": plan.settings.model_dump(mode="json"),
        "tensors_unused": unused,
        "notes": notes,
    }
