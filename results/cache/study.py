"""The numbers of the study on the cache: how few keys and values predictions need, and what these must have read.

    python results/cache/study.py                           prints the tables
    python results/cache/study.py --figures results/cache   draws the figure, too
    python results/cache/study.py --numbers numbers.csv     writes all numbers, too
    python results/cache/study.py collect OUT               adds what run.sh has measured so far to this folder
    python results/cache/study.py restore OUT               writes cells with effects as `olmo-sparsity measure` would

A cell that is not complete has the blocks that were finished, in the order in which they were drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import Result, load_study
from analysis.figures.style import add_legend, draw, log_axis, model_styles, new_figure, save_figure
from analysis.measurement import FRAMES, RESULT_NAME, save_study
from analysis.parquet import stacked
from analysis.saved import without_folders
from analysis.stats import comparisons, numbers
from analysis.stats.recovery import with_over_tau
from analysis.stats.tables import Tables, interval_frame
from analysis.study_options import study_parser

HERE = Path(__file__).parent
EXACT = "leave-one-out-kl/cache:4"
OTHERS = ("attention", "snapkv")
TEXTS = ("books", "code", "releases")
COMPARED_AT = (4, 16)
NUM_COMPARISONS = 24
"""Of the protocol: two models, three texts, two selectors, two k."""
PLAIN_WORD = re.compile(r"[^\w\s]?[^\W\d_]+(?:['’-][^\W\d_]+)*[^\w\s]{0,2}")
"""Letters, with inner apostrophes and hyphens, and punctuation around them."""
MODELS = {"smollm2": "SmolLM2", "gemma": "Gemma 3"}


def collect(out: Path, records: Path) -> None:
    """Add what is measured of every cell in a folder of run.sh, complete or not, to the records and their blocks.

    In place of the text there is a column plain_word, and the effects stand in files of their own, in half floats.
    """
    records.mkdir(parents=True, exist_ok=True)
    study = load_study(records) if (records / RESULT_NAME).is_file() else {}
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        parts = [as_recorded(part) for part in Result.load_parts(folder)]
        if not parts:
            continue
        if folder.name in study:
            measured = stacked([part.targets for part in parts])["target_id"]
            parts += others_of(with_effects(study[folder.name], effects_path(records, folder.name)), measured)
        result = Result.of_parts(parts)
        if result.effects is not None:
            save_effects(result.effects, effects_path(records, folder.name))
        study[folder.name] = replace(result, effects=None)
    save_study(records, study)


def effects_path(records: Path, cell: str) -> Path:
    """The file of a cell's effects."""
    return records / f"effects-{cell}.npz"


def as_recorded(part: Result) -> Result:
    """What the records keep of a part, and its effects."""
    targets = part.targets.assign(plain_word=plain_words(part))
    return replace(without_folders(part), targets=targets, scores=None, texts=None)


def others_of(result: Result, measured: pd.Series) -> list[Result]:
    """The part of a result whose targets are not among those that were measured; none where there is no such target."""
    frames = {}
    for name in FRAMES:
        frame = getattr(result, name)
        if frame is not None:
            frame = frame[~frame["target_id"].isin(measured)]
        frames[name] = frame
    return [replace(result, **frames)] if len(frames["targets"]) else []


def save_effects(effects: pd.DataFrame, path: Path) -> None:
    """Write target_id (m,), log_kl (m, F), of KL in nats, and loss_change_nats (m, F), in half floats."""
    kl_nats = np.maximum(np.stack(effects["kl_nats"]), 0)  # some are below 0, by rounding
    with np.errstate(divide="ignore"):  # log 0 is -inf, which a half float has
        log_kl = np.log(kl_nats)
    np.savez_compressed(
        path,
        target_id=effects["target_id"],
        log_kl=log_kl.astype(np.float16),
        loss_change_nats=np.stack(effects["loss_change_nats"]).astype(np.float16),
    )


def with_effects(result: Result, path: Path) -> Result:
    """The result with the effects that a file holds, a KL to within 0.4 % where it is over exp(-16) nats."""
    if not path.is_file():
        return result
    with np.load(path) as arrays:
        effects = pd.DataFrame({"target_id": arrays["target_id"]})
        effects["kl_nats"] = list(np.exp(arrays["log_kl"].astype(np.float64)))
        effects["loss_change_nats"] = list(arrays["loss_change_nats"].astype(np.float64))
    return replace(result, effects=effects)


def restore(records: Path, out: Path) -> None:
    """Write every cell with effects to a folder of its name, for `olmo-sparsity eviction --effects`."""
    for cell, result in load_study(records).items():
        whole = with_effects(result, effects_path(records, cell))
        if whole.effects is not None:
            whole.save(out / cell)


def plain_words(result: Result) -> np.ndarray:
    """Whether each target is a part of a word of letters alone, (n,) bool; False where no text was kept.

    So URLs, numbers, code and markup are none: what stands between the spaces around it has other characters.
    """
    plain = np.zeros(len(result.targets), dtype=bool)
    if result.texts is None:
        return plain
    contexts = result.settings.contexts
    pieces_of = dict(zip(result.texts["block"], result.texts["pieces"], strict=True))
    for row, target_id in enumerate(result.targets["target_id"]):
        block, offset = divmod(target_id, contexts.targets_per_block)
        if block in pieces_of:
            plain[row] = (
                PLAIN_WORD.fullmatch(run_around(pieces_of[block], contexts.n_long + offset)) is not None
            )
    return plain


def run_around(pieces: Sequence[str], place: int) -> str:
    """The run of characters without spaces that the piece at a place begins, or goes on with."""
    text = "".join(pieces[place:])
    after = text.lstrip()
    before = ""
    if after == text:
        before = re.split(r"\s", "".join(pieces[:place]))[-1]
    return before + re.split(r"\s", after, maxsplit=1)[0]


def add_cell(tables: Tables, cell: str, result: Result) -> None:
    """All numbers of a cell."""
    size = result.settings.contexts.targets_per_block
    blocks = (result.targets["target_id"] // size).nunique()
    groups = result.targets.iloc[result.over]["group"].nunique()
    of_all = "" if result.settings.complete else f" of {result.settings.targets_requested // size}"
    over = f"{len(result.over)} of {len(result.targets):,} targets over 1 nat"
    title = f"{cell}: {over}, {groups} groups, {blocks}{of_all} blocks"
    tables.add(title, numbers.shares(result), digits=1)
    recovery = numbers.recovery(result, selector=result.selectors)
    for (level, unit, sinks), of_way in recovery.groupby(["level", "unit", "sinks"], sort=False):
        tables.add(f"{cell}, recovery as {level}:{sinks}/{unit}", of_way, across="far_context")
    needed = comparisons.smallest_k(result)
    needed = needed[needed["far_context"] == "true"]
    tables.add(f"{cell}, enough from k keys and values or fewer", needed, across="k")
    if set(OTHERS) <= set(result.selectors):
        frame = comparisons.adjusted_differences({cell: result}, COMPARED_AT, OTHERS).drop(columns="p_holm")
        tables.add(f"{cell}, net, less that of", frame)
    bins = numbers.target_bins(result, selector=EXACT, far_context="net", k=4)
    tables.add(f"{cell}, net, by gain and by p_long", bins)
    if result.targets["plain_word"].any():
        is_plain = result.targets["plain_word"].to_numpy()[result.over]
        share_of_gain = is_plain @ result.gain_nats[result.over] / result.gain_nats[result.over].sum()
        words = with_over_tau(
            result, lambda one: (one.targets["over_tau"] & one.targets["plain_word"]).to_numpy()
        )
        of_words = numbers.recovery(words, selector=EXACT, far_context="net")
        title = (
            f"{cell}, {len(words.over)} targets in words of letters alone, {share_of_gain:.0%} of the gain"
        )
        tables.add(title, of_words, across="k")
    specificity = numbers.specificity(result, selector=EXACT)
    tables.add(f"{cell}, specificity; sinks alone: k 0", specificity, across="k")
    if cell.endswith("-nulls"):
        tables.add(f"{cell}, specificity, own less the others", own_less_others(result), across="k")
    if cell.endswith("-ladder"):
        tables.add(f"{cell}, far tokens read and kept", rungs(result), percent=False, across="k")
        tables.add(f"{cell}, one way to keep less another", steps(result), across="k")
        return
    for by in ("gain_nats", "p_long"):
        frame = comparisons.by_bins(numbers.specificity, result, by, selector=EXACT, k=4)
        tables.add(f"{cell}, specificity by {by}", frame, across="name")
    kinds = numbers.kinds(result, selector=EXACT, far_context="net", k=4)
    tables.add(f"{cell}, net, by kind", kinds[kinds["name"] == "recovery"])


def add_comparisons(tables: Tables, study: Mapping[str, Result]) -> None:
    """Numbers of several cells: tests of the protocol, N 1,024 and more less N 256, and all texts of a ladder."""
    of_n256 = {cell: result for cell, result in study.items() if cell.endswith("-n256")}
    if of_n256:
        frame = comparisons.adjusted_differences(of_n256, COMPARED_AT, OTHERS, num_tests=NUM_COMPARISONS)
        title = f"N 256, net, less that of; p_holm over {NUM_COMPARISONS} tests"
        if len(frame) < NUM_COMPARISONS:
            title += ", those not measured yet as p = 1"
        tables.add(title, frame)
    for cell, result in study.items():
        shorter = re.sub(r"-n(1024|4096)$", "-n256", cell)
        if shorter != cell and shorter in study:
            add_less_n256(tables, cell, result, study[shorter])
    for model, name in MODELS.items():
        for kind in ("n256", "n1024", "n4096", "ladder", "nulls"):
            cells = cells_of(study, model, kind)
            if cells:
                title = f"{name}, {kind} of {len(cells)} texts together"
                add_together(tables, title, kind, of_all_texts(cells))
        add_together_less_n256(tables, study, model)


def add_together_less_n256(tables: Tables, study: Mapping[str, Result], model: str) -> None:
    """The same for the texts of a longer N together, less those texts at N 256."""
    for kind in ("n1024", "n4096"):
        longer = cells_of(study, model, kind)
        longer = {cell: result for cell, result in longer.items() if cell.replace(kind, "n256") in study}
        shorter = {cell: study[cell.replace(kind, "n256")] for cell in longer}
        if not longer:
            continue
        texts = "texts"
        if len(longer) < len(TEXTS):
            texts = " and ".join(cell.split("-")[1] for cell in longer)
            needed = comparisons.smallest_k(of_all_texts(shorter))
            needed = needed[needed["far_context"] == "true"]
            title = f"{MODELS[model]}, n256, {texts} together, enough from k keys and values or fewer"
            tables.add(title, needed, across="k")
        title = f"{MODELS[model]}, {kind}, {texts} together"
        add_less_n256(tables, title, of_all_texts(longer), of_all_texts(shorter))


def add_less_n256(tables: Tables, title: str, longer: Result, shorter: Result) -> None:
    """What more or less is recovered, and how many targets more or fewer have enough, than at N 256."""
    recovery = comparisons.result_differences(longer, shorter)
    recovery = recovery[recovery["name"] == "recovery"]
    tables.add(f"{title} less N 256, recovery", recovery, across="far_context")
    needed = comparisons.smallest_k_differences(longer, shorter)
    tables.add(f"{title} less N 256, enough from k or fewer", needed, across="k")


def add_together(tables: Tables, title: str, kind: str, together: Result) -> None:
    """Numbers of one kind of cell, of all texts of a model at once."""
    selectors = [EXACT] if kind in ("ladder", "nulls") else together.selectors
    recovery = numbers.recovery(together, selector=selectors)
    tables.add(f"{title}, {len(together.over)} targets, recovery", recovery, across="far_context")
    if kind == "ladder":
        tables.add(f"{title}, one way to keep less another", steps(together), across="k")
    elif kind == "nulls":
        tables.add(f"{title}, specificity", numbers.specificity(together, selector=EXACT), across="k")
        tables.add(f"{title}, specificity, own less the others", own_less_others(together), across="k")
    else:
        needed = comparisons.smallest_k(together)
        needed = needed[needed["far_context"] == "true"]
        tables.add(f"{title}, enough from k keys and values or fewer", needed, across="k")
        others = [name for name in together.selectors if name != EXACT]
        if others:
            frame = comparisons.adjusted_differences({title: together}, COMPARED_AT, others)
            tables.add(f"{title}, net, less that of", frame.drop(columns="p_holm"))


STEPS = [
    *((("text", "before:2"), ("text", unit)) for unit in ("behind:2", "ranked:2", "drawn:2")),
    (("text", "before:2"), ("text", "token")),
    (("cache", "token"), ("text", "before:2")),
    (("cache", "token"), ("text", "ranked:2")),
    *((("cache", "token"), ("cache", f"read:{window}")) for window in (1, 2, 4, 16)),
]
"""Level and unit of two ways to keep tokens, behind four sinks: of each pair the difference is taken, paired."""


def steps(result: Result) -> pd.DataFrame:
    """Recovery of tokens kept in one way less that of another: every pair of `STEPS`."""
    frames = []
    for ways in STEPS:
        first, second = ({"level": level, "unit": unit, "sinks": 4} for level, unit in ways)
        frame = comparisons.kept_as_differences(result, first, second)
        names = [f"{level}/{unit}" for level, unit in ways]
        frames.append(frame.assign(way=names[0], less=names[1]))
    return pd.concat(frames, ignore_index=True)


def own_less_others(result: Result) -> pd.DataFrame:
    """What a target's own tokens recover more than every null, of the exact choice."""
    frame = comparisons.specificity_differences(result)
    return frame[frame["selector"] == EXACT].drop(columns="selector")


def rungs(result: Result) -> pd.DataFrame:
    """How many far tokens the model reads and keeps in every way to keep them, means over targets."""
    choices = result.choices
    choices = choices[choices["far_context"] == "true"]
    rows = []
    for (level, unit), of_way in choices.groupby(["level", "unit"], sort=False):
        for name in ("tokens_read", "tokens_kept"):
            for k, value in zip(result.ks, np.stack(of_way[name]).mean(axis=0), strict=True):
                rows.append({"way": f"{level}/{unit}", "name": name, "k": k, "value": value})
    return interval_frame(rows, ["way", "name", "k"])


def cells_of(study: Mapping[str, Result], model: str, kind: str) -> dict[str, Result]:
    """Those of one model and kind, of every text that is measured."""
    return {cell: result for cell, result in study.items() if re.fullmatch(f"{model}-.*-{kind}", cell)}


def of_all_texts(cells: Mapping[str, Result]) -> Result:
    """Cells of one model and kind as one result, whose texts and groups are those of all of them."""
    targets = []
    choices = []
    first_id = 0
    first_text = 0
    for cell, result in cells.items():
        _, text, _ = cell.split("-", 2)
        rows = result.targets
        groups = [f"{text}/{group}" for group in rows["group"]]
        targets.append(
            rows.assign(target_id=rows["target_id"] + first_id, text=rows["text"] + first_text, group=groups)
        )
        choices.append(result.choices.assign(target_id=result.choices["target_id"] + first_id))
        first_id += result.settings.targets_requested
        first_text += int(rows["text"].max()) + 1
    first = next(iter(cells.values()))
    return replace(first, targets=stacked(targets), choices=stacked(choices))


CRITERIA = {
    "half": "have half their gain",
    "nine_tenths": "have nine tenths",
    "all_but_a_tenth_of_a_nat": "lack at most 0.1 nats",
}
"""Names of `smallest_k`, and what the figure says of the targets that are counted."""


ALL = "all three"
"""Of the texts together, which N 4,096 is shown for alone: its texts have two or three blocks each."""


def figure(study: Mapping[str, Result]) -> Figure | None:
    """Share of the targets that have enough from k keys and values: rows are criteria, columns texts; None without."""
    frames = []
    for (model, name), kind in product(MODELS.items(), ("n256", "n1024", "n4096")):
        cells = cells_of(study, model, kind)
        shown = {cell.split("-")[1]: result for cell, result in cells.items() if kind != "n4096"}
        if len(cells) == len(TEXTS):
            shown[ALL] = of_all_texts(cells)
        for text, result in shown.items():
            frame = comparisons.smallest_k(result)
            label = f"{name}, N {result.settings.contexts.n_long:,}"
            frames.append(frame[frame["selector"] == EXACT].assign(text=text, cell=label))
    if not frames:
        return None
    curves = pd.concat(frames, ignore_index=True)
    curves[["value", "low", "high"]] *= 100
    looks = model_styles(dict.fromkeys(curves["cell"]))
    texts = [text for text in (ALL, *TEXTS) if text in set(curves["text"])]
    drawn = new_figure(8.6, 5.6)
    panels = drawn.subplots(len(CRITERIA), len(texts), sharex=True, sharey=True, squeeze=False)
    for row, (criterion, label) in zip(panels, CRITERIA.items(), strict=True):
        for axes, text in zip(row, texts, strict=True):
            inside = (curves["text"] == text) & (curves["name"] == criterion)
            draw(axes, curves[inside], looks, "cell", "k")
        row[0].set_ylabel(f"{label}\n[% of targets]")
    for axes, text in zip(panels[0], texts, strict=True):
        axes.set_title(text, loc="left")
        axes.set_ylim(0, 100)
    for axes in panels[-1]:
        log_axis(axes, sorted(set(curves["k"]))[::2])
        axes.set_xlabel("k [keys and values]")
    add_legend(drawn, looks)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables of every cell; write them, and draw the figure, where that is asked for."""
    parser = study_parser(__doc__, HERE, figures=True)
    parser.add_argument("command", nargs="?", choices=("collect", "restore"))
    parser.add_argument("of", nargs="?", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    if options.command and options.of is None:
        parser.error(f"{options.command} needs the folder OUT")
    if options.command == "collect":
        collect(options.of, options.records)
        return
    if options.command == "restore":
        restore(options.records, options.of)
        return
    study = load_study(options.records)
    tables = Tables(digits=0)
    for cell, result in study.items():
        add_cell(tables, cell, result)
    add_comparisons(tables, study)
    if options.numbers:
        tables.save(options.numbers)
    drawn = figure(study) if options.figures else None
    if drawn is not None:
        save_figure(drawn, options.figures / "needed.png")


if __name__ == "__main__":
    main()
