"""The numbers of the study on eviction: which policies keep what the next predictions need.

    python results/eviction/study.py                              prints the tables
    python results/eviction/study.py --figures results/eviction   draws the figure, too
    python results/eviction/study.py --numbers numbers.csv        writes the numbers of all tables, too
    python results/eviction/study.py collect OUT                  adds what run.sh has measured so far to this folder

A cell that is not complete has the blocks that were judged, in the order in which they were drawn.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.cache_eviction import numbers
from analysis.cache_eviction.figure import BEST, policy_looks
from analysis.cache_eviction.figure import drawn as policies_of_panel
from analysis.cache_eviction.record import AWARE, BLIND, HEAD, NOTHING, PARTS, TARGETS
from analysis.cache_eviction.result import EvictionResult
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.contexts import TRUE
from analysis.figures import style
from analysis.saved import without_folders
from analysis.stats.tables import INTERVAL, Tables
from analysis.study_options import study_parser
from olmo_sparsity.util.files import read_json

HERE = Path(__file__).parent
PLACES = "places.json"
"""Of needles: of every text, where the words stand in the far context, by what they are."""
TEXTS = ("books", "code", "releases")
REFERENCE = numbers.SNAPKV
"""The policy that others are compared with."""
MIDDLE = 0.12
"""The budget of tables that show one."""
SEEN_BY_FIRST = 16
"""So many targets the reference of the first ones sees."""
OF_BLIND = SAME_AS_NEAREST = "streaming-llm"
"""The blind policy that blind ones are compared with; it keeps the sinks and what the control `nearest` keeps."""
EXACT = "leave-one-out-kl"
"""The reference."""
POOLED = ("n256", "n1024", "references", "horizon", "blindhorizon", "n4096")
"""Cells that are also shown with all texts as one."""
VERDICTS = ("n256", "n1024")
"""Cells in which policies are called better or worse."""
LENGTHS = ("n256", "n1024", "n4096")
MODELS = ("smollm2", "gemma")
LOSS_STEP, KL_BITS = 2.0**-12, 11
"""Of losses in the records, nats, and of KLs, to within 0.05 %."""
LEVEL = 0.05
"""Of tests, by Holm."""
Study = Mapping[str, EvictionResult]


def collect(out: Path, records: Path) -> None:
    """Copy what is judged of every cell in a folder of run.sh, complete or not, without the folders of its machine.

    Losses are rounded, see `rounded`.
    """
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        paths = [folder] if (folder / HEAD).is_file() else sorted((folder / PARTS).glob("*/"))
        parts = [EvictionResult.load(path) for path in paths if (path / HEAD).is_file()]
        if not parts:
            continue
        rounded(without_folders(EvictionResult.of_parts(parts))).save(records / folder.name)
        if (folder / PLACES).is_file():
            shutil.copy(folder / PLACES, records / folder.name)


def rounded(result: EvictionResult) -> EvictionResult:
    """The same with losses in steps of `LOSS_STEP` and KLs of `KL_BITS` bits, which a third of the room holds."""
    loss = result.losses["loss_nats"].to_numpy(np.float64)
    mantissa, exponent = np.frexp(result.losses["kl_nats"].to_numpy(np.float64))
    kl = np.ldexp(np.round(mantissa * 2**KL_BITS), exponent - KL_BITS)
    values = {"loss_nats": np.round(loss / LOSS_STEP) * LOSS_STEP, "kl_nats": kl}
    return replace(result, losses=result.losses.assign(**values).astype(dict.fromkeys(values, np.float32)))


def load_cells(records: Path) -> dict[str, EvictionResult]:
    """The cells of the study, by name."""
    return {head.parent.name: EvictionResult.load(head) for head in sorted(records.glob(f"*/{HEAD}"))}


def kind_of(cell: str) -> str:
    """What is measured in a cell, such as n256."""
    return cell.split("-")[2]


def budget_of(result: EvictionResult) -> float:
    """`MIDDLE`, or the middle one of other budgets."""
    settings = result.settings
    return MIDDLE if MIDDLE in settings.budgets else settings.budgets[settings.middle]


@dataclass(frozen=True)
class Part:
    """Policies of a cell that one table shows beside one another."""

    sees: str
    """What its policies see: `AWARE` or `BLIND`."""
    near: str
    policies: list[str]
    """And controls."""
    references: list[str]

    @property
    def name(self) -> str:
        """As titles have it."""
        sees = "blind" if self.sees == BLIND else "aware"
        return f"{sees}, near {self.near}"

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Those of a frame that are of policies, controls and references of the part."""
        shown = frame["policy"].isin([*self.policies, *self.references])
        return frame[shown & (frame["near"] == self.near)]


def parts_of(result: EvictionResult) -> list[Part]:
    """Aware policies, by what becomes of the near tokens, and blind ones; controls beside either.

    Beside `SAME_AS_NEAREST`, which keeps the same keys, `nearest` is left out.
    """
    judged = result.policies
    references = list(result.settings.references)
    parts = []
    for sees, near in ((AWARE, NEAR_KEPT), (AWARE, NEAR_REREAD), (BLIND, NEAR_REREAD)):
        of_near = judged[judged["near"] == near]
        policies = of_near.loc[of_near["sees"].isin([sees, NOTHING]), "policy"].tolist()
        if SAME_AS_NEAREST in policies and "nearest" in policies:
            policies.remove("nearest")
        if (of_near["sees"] == sees).any():
            parts.append(Part(sees, near, policies, references))
    return parts


def parts_as_used(result: EvictionResult) -> list[Part]:
    """Near tokens are kept behind aware policies, where that was measured, and read again behind blind ones."""
    parts = parts_of(result)
    if NEAR_KEPT in result.nears:
        parts = [part for part in parts if part.sees == BLIND or part.near == NEAR_KEPT]
    return parts


@dataclass(frozen=True)
class CellFrames:
    """Frames of a cell that several tables are made from."""

    result: EvictionResult

    @cached_property
    def summary(self) -> pd.DataFrame:
        """See `EvictionResult.summary`."""
        return self.result.summary()

    @cached_property
    def best_found(self) -> pd.DataFrame | None:
        """See `EvictionResult.best_found`; None of one block."""
        return self.result.best_found() if self.result.counts["blocks"] > 1 else None

    def losses(self, part: Part) -> pd.DataFrame:
        """Loss over full of a part, the best at `budget_of` first, and what is best found of these."""
        frame = part.rows(self.summary)
        frame = frame[frame["name"] == numbers.LOSS]
        at_middle = frame[frame["budget"] == budget_of(self.result)].sort_values("value", kind="stable")
        order = {policy: number for number, policy in enumerate(at_middle["policy"])}
        frame = frame.sort_values("policy", key=lambda names: names.map(order), kind="stable")
        frames = [frame]
        if self.result.counts["blocks"] > 1:
            best = self.result.best_found(policies=[*part.policies, *part.references])
            is_loss = (best["name"] == numbers.LOSS) & (best["near"] == part.near)
            frames.append(best[is_loss].assign(policy=BEST))
        return pd.concat([frame[["policy", "budget", *INTERVAL]] for frame in frames])


def print_cell(tables: Tables, cell: str, measured: EvictionResult) -> None:
    """Print the tables of a cell."""
    result = in_far_context(measured, TRUE)
    frames = CellFrames(result)
    size = result.counts
    of_all = (
        f" of {result.settings.blocks_requested}" if size["blocks"] < result.settings.blocks_requested else ""
    )
    title = (
        f"{cell}: {size['targets']:,} targets, {size['blocks']}{of_all} blocks, {size.get('groups')} groups"
    )
    tables.add(title, result.gain())
    tables.add(f"{cell}: loss over full, nats, where nothing is chosen", result.caches(), across="near")
    for part in parts_of(result):
        print_part(tables, f"{cell}, {part.name}", frames, part)
    for near in result.nears:
        print_best(f"{cell}, near {near}", frames, near)
        frame = result.aware_less_blind(near)
        if len(frame):
            print_differences(tables, frame, f"{cell}, near {near}: aware less blind")
    tells = result.agreement_tells()
    if len(tells):
        tells = tells[["near", "n_policies", "budget", "name", *INTERVAL]]
        title = f"{cell}: rank correlation over policies of agreement with loss over full"
        tables.add(title, tells, across="budget", digits=1)
    if kind_of(cell) in ("horizon", "blindhorizon"):
        print_horizon(tables, cell, result)
    elif kind_of(cell) == "references":
        print_references(tables, cell, measured)
    else:
        for part in parts_as_used(result):
            print_compared(tables, f"{cell}, {part.name}", result, part)
    if kind_of(cell) in VERDICTS:
        print_where(tables, cell, result)


def print_part(tables: Tables, what: str, frames: CellFrames, part: Part) -> None:
    """Print the numbers of the policies of one part."""
    result = frames.result
    tables.add(f"{what}: loss over full, nats", frames.losses(part), across="budget")
    at_middle = part.rows(frames.summary)
    at_middle = at_middle[at_middle["budget"] == budget_of(result)]
    options_of: dict[tuple[str, ...], dict[str, Any]] = {
        (numbers.KL, numbers.TOP): {},
        (numbers.SHARE, numbers.OVERLAP): {"percent": True, "digits": 0},
        (numbers.SPEARMAN,): {},
    }
    for names, options in options_of.items():
        of_names = at_middle[at_middle["name"].isin(names)]
        if len(of_names):
            title = f"{what}, {100 * budget_of(result):g} %: {', '.join(of_names['name'].unique())}"
            tables.add(title, of_names[["policy", "name", *INTERVAL]], across="name", **options)


def print_compared(tables: Tables, what: str, result: EvictionResult, part: Part) -> None:
    """Print what policies of one part lose more than one of them, and more than the reference."""
    for other in (reference_of(part), EXACT):
        if other in part.policies or other in part.references:
            among = [name for name in (*part.policies, *part.references) if name != other]
            if other == EXACT:
                among = part.policies
            frame = result.differences(other, part.near, among)
            print_differences(tables, frame, f"{what}: less {other}")


def reference_of(part: Part) -> str:
    """The policy that those of a part are compared with."""
    return OF_BLIND if part.sees == BLIND else REFERENCE


def print_differences(tables: Tables, frame: pd.DataFrame, title: str) -> None:
    """Print differences, and p of those that are tested: how many these are stands above."""
    shown = frame[["policy", "budget", *INTERVAL]]
    tables.add(title, shown, across="budget")
    tested = frame[frame["p_holm"].notna()]
    if len(tested):
        p_values = tested[["policy", "budget"]].assign(value=tested["p_holm"], low=np.nan, high=np.nan)
        title = f"{title}: p by Holm over {len(tested)} tests"
        tables.add(title, p_values, across="budget", digits=3)


def print_best(what: str, frames: CellFrames, near: str) -> None:
    """Print what either half of the groups chooses, by budget."""
    if frames.best_found is None:
        return
    best = frames.best_found
    best = best[(best["name"] == numbers.LOSS) & (best["near"] == near)]
    print(f"\n{what}: best found on either half of the groups")
    for row in best.itertuples():
        print(f"{100 * row.budget:g} %  {row.first}, {row.second}")


def print_where(tables: Tables, cell: str, result: EvictionResult) -> None:
    """Print where policies fail, as they are used, at one budget: by gain, kind, and distance from the choice."""
    for name, across, frame in (
        ("gain, in nats, above", "above_nats", result.by_gain()),
        ("kind", "kind", result.by_kind()),
        ("distance from the choice, in tokens, below", "to_tokens", result.by_distance()),
    ):
        for part in parts_as_used(result):
            shown = part.rows(frame)
            shown = shown[shown["budget"] == budget_of(result)]
            counts = ""
            if "n_targets" in shown:
                counts = f"; targets {shown.drop_duplicates(across).set_index(across)['n_targets'].to_dict()}"
            title = f"{cell}, {part.name}, by {name}{counts}"
            tables.add(title, shown[["policy", across, *INTERVAL]], across=across)


def print_horizon(tables: Tables, cell: str, result: EvictionResult) -> None:
    """Print losses by distance from the choice; and of the targets that the reference of the next 16 has not seen, what
    policies and references lose more than a reference, or blind policies more than one of them."""
    by_distance = result.by_distance()
    is_later = result.targets["place"] >= SEEN_BY_FIRST
    later = replace(result, targets=result.targets[is_later].reset_index(drop=True))
    for part in parts_as_used(result):
        what = f"{cell}, {part.name}"
        frame = part.rows(by_distance)
        frame = frame[frame["budget"] == budget_of(result)]
        title = f"{what}: loss over full, nats, by distance from the choice, in tokens, below"
        tables.add(title, frame[["policy", "to_tokens", *INTERVAL]], across="to_tokens")
        if REFERENCE in part.policies:  # one of the surprises that the protocol names
            frame = result.differences(REFERENCE, part.near, ["random"])
            tables.add(f"{what}: less {REFERENCE}", frame[["policy", "budget", *INTERVAL]], across="budget")
        references = [name for name in part.references if name.startswith(EXACT)]
        for reference in references or [OF_BLIND]:
            among = [name for name in (*part.policies, *part.references) if name != reference]
            frame = later.differences(reference, part.near, among)
            print_differences(tables, frame, f"{what}, later targets: less {reference}")


def in_far_context(result: EvictionResult, far_context: str) -> EvictionResult:
    """What was measured in one far context."""
    of_frames = {name: getattr(result, name) for name in ("losses", "choices")}
    rows = {name: frame[frame["far_context"] == far_context] for name, frame in of_frames.items()}
    return replace(result, **rows)


def print_references(tables: Tables, cell: str, result: EvictionResult) -> None:
    """Print what other references lose more than `EXACT`; and what all lose in the far context of another text, where
    a loss below that with the full cache is luck."""
    others = [name for name in result.settings.references if name != EXACT]
    for far_context in result.far_contexts:
        of_context = in_far_context(result, far_context)
        frames = CellFrames(of_context)
        for part in parts_of(of_context):
            what = f"{cell}, {part.name}, {far_context} far context"
            if far_context != TRUE:
                tables.add(f"{what}: loss over full, nats", frames.losses(part), across="budget")
            frame = of_context.differences(EXACT, part.near, others)
            print_differences(tables, frame, f"{what}: references less {EXACT}")


def print_verdicts(study: Study, of_all: Study) -> None:
    """Print which policies are better or worse than one in all texts taken together: where p by Holm is below 0.05, and
    the difference has the same sign in every text."""
    for cell, pooled_texts in of_all.items():
        if kind_of(cell) not in VERDICTS:
            continue
        model, _, kind = cell.split("-")
        alone = [result for name, result in study.items() if name in cells_of(model, kind)]
        for part in parts_as_used(pooled_texts):
            reference = reference_of(part)
            if reference not in part.policies:
                continue
            among = [name for name in part.policies if name != reference]
            frame = pooled_texts.differences(reference, part.near, among)
            keys = ["policy", "budget"]
            signs = [np.sign(frame["value"])]
            for result in alone:
                of_text = result.differences(reference, part.near, among).set_index(keys)["value"]
                signs.append(np.sign(of_text.loc[pd.MultiIndex.from_frame(frame[keys])].to_numpy()))
            alike = (np.stack(signs) == signs[0].to_numpy()).all(axis=0)
            passed = frame[(frame["p_holm"] < LEVEL) & alike]
            print(f"\n{cell}, {part.name}, {len(alone)} texts: less {reference} by Holm, alike in every text")
            for name, is_better in (("better", True), ("worse", False)):
                rows = passed[(passed["value"] < 0) == is_better]
                for policy, budgets in rows.groupby("policy", sort=False)["budget"]:
                    print(f"{name}  {policy}  {', '.join(f'{100 * budget:g}' for budget in budgets)} %")
            if passed.empty:
                print("none")


def print_needles(tables: Tables, cell: str, result: EvictionResult, records: Path) -> None:
    """Print the loss of both words, and the share of heads that keep them."""
    last = result.settings.contexts.targets_per_block - 1
    for name, place in (("asked for", 0), ("not asked for yet", last)):
        at_place = result.targets[result.targets["place"] == place].reset_index(drop=True)
        of_word = replace(result, targets=at_place)
        frames = CellFrames(of_word)
        tables.add(f"{cell}: the word {name}", of_word.gain())
        for part in parts_of(result):
            title = f"{cell}, {part.name}: loss over full, nats, of the word {name}"
            tables.add(title, frames.losses(part), across="budget")
    words = words_of(
        result.targets, read_json(records / cell / PLACES, "collect the cell again", expect=list)
    )
    frame = result.keeps(words)
    for part in parts_of(result):
        for name, rows in part.rows(frame).groupby("name", sort=False):
            title = f"{cell}, {part.name}: per cent of heads that keep the word {name}"
            shown = rows[["policy", "budget", *INTERVAL]]
            tables.add(title, shown, across="budget", percent=True, digits=0)


def words_of(targets: pd.DataFrame, places: Sequence[Mapping[str, int]]) -> pd.DataFrame:
    """Block, name and column of the words of every text, from the frame of targets and what `PLACES` has."""
    rows = []
    for block, text in targets.drop_duplicates("block")[["block", "text"]].itertuples(index=False):
        for name, column in places[text].items():
            rows.append({"block": block, "name": name, "column": column})
    return pd.DataFrame(rows)


def pooled(study: Study) -> dict[str, EvictionResult]:
    """The cells of one kind of a model, all texts as one, where there are two or more."""
    joined = {}
    for model in MODELS:
        for kind in POOLED:
            cells = {name: study[cell] for cell, name in cells_of(model, kind).items() if cell in study}
            if len(cells) > 1:
                joined[f"{model}-all-{kind}"] = EvictionResult.pool(cells)
    return joined


def cells_of(model: str, kind: str) -> dict[str, str]:
    """The texts of the cells of one kind of a model, by the cell's name."""
    return {f"{model}-{text}-{kind}": text for text in TEXTS}


def by_length(study: Study, text: str) -> pd.DataFrame:
    """What is left of the gain at one budget, near tokens read again, against N: policy, sees, N, value, low, high."""
    frames = []
    for kind in LENGTHS:
        result = study.get(f"smollm2-{text}-{kind}")
        if result is not None:
            frame = result.summary()
            is_share = (frame["name"] == numbers.SHARE) & (frame["near"] == NEAR_REREAD)
            frame = frame[is_share & (frame["budget"] == budget_of(result))]
            frames.append(frame.assign(N=result.settings.contexts.n_long)[["policy", "sees", "N", *INTERVAL]])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def order_alike(first: EvictionResult, second: EvictionResult, near: str) -> tuple[float, int]:
    """Spearman's correlation of loss over full at one budget over policies, between two cells, and their number."""
    of_cells = []
    for result in (first, second):
        frame = result.summary()
        is_shown = (frame["name"] == numbers.LOSS) & (frame["near"] == near)
        is_shown &= (frame["budget"] == budget_of(result)) & (frame["sees"] != TARGETS)
        of_cells.append(frame[is_shown].set_index("policy")["value"])
    both = pd.concat(of_cells, axis=1, join="inner")
    return float(both.corr(method="spearman").iloc[0, 1]), len(both)


def print_lengths(tables: Tables, study: Study) -> None:
    """Print what is left of the gain against N, and how alike the order of policies is at two N."""
    for text in (*TEXTS, "all"):
        frame = by_length(study, text)
        for name, hidden in (("aware", BLIND), ("blind", AWARE)):
            if frame.empty:
                continue
            rows = frame[frame["sees"] != hidden].drop(columns="sees")
            title = (
                f"{text}, {name}, near reread, {100 * MIDDLE:g} %: per cent of the gain that is left, by N"
            )
            tables.add(title, rows, across="N", percent=True, digits=0)
        short, long = (study.get(f"smollm2-{text}-{kind}") for kind in ("n256", "n1024"))
        if short is not None and long is not None:
            for near in (NEAR_KEPT, NEAR_REREAD):
                correlation, count = order_alike(short, long, near)
                what = f"rank correlation of {count} policies between N 256 and 1,024"
                print(f"\n{text}, near {near}, {100 * MIDDLE:g} %: {what}: {correlation:.2f}")


@matplotlib.rc_context(style.STYLE)
def figure(study: Study, model: str = "smollm2") -> Figure | None:
    """Loss over full against the budget, a column a text, aware policies above and blind ones below.

    N 1,024, or 256 where that is measured on more texts; None without cells.
    """
    short, cells = (
        {text: study[name] for name, text in cells_of(model, kind).items() if name in study}
        for kind in ("n256", "n1024")
    )
    if len(short) > len(cells):
        cells = short
    if not cells:
        return None
    frames = []
    for text, result in cells.items():
        shown = [result.summary()]
        if result.counts["blocks"] > 1:
            for near in result.nears:
                best = result.best_found(policies=policies_of_panel(result.policies, near))
                shown.append(best[best["near"] == near].assign(policy=BEST, sees=TARGETS))
        for frame in shown:
            frames.append(frame[frame["name"] == numbers.LOSS].assign(text=text))
    rows = pd.concat(frames, ignore_index=True)
    rows["label"] = rows["policy"].str.replace(":blind=1", "", regex=False)
    rows["percent"] = 100 * rows["budget"]
    looks = policy_looks(list(rows["label"].unique()))
    drawn = style.new_figure(style.PAGE, 5.6)
    panels = drawn.subplots(2, len(cells), sharex=True, sharey=True, squeeze=False)
    for near, of_near in zip((NEAR_KEPT, NEAR_REREAD), panels, strict=True):
        for axes, text in zip(of_near, cells, strict=True):
            of_text = rows[rows["text"] == text]
            of_panel = of_text[
                (of_text["near"] == near) & of_text["policy"].isin(policies_of_panel(of_text, near))
            ]
            if near == NEAR_REREAD:
                of_panel = of_panel[of_panel["policy"] != "nearest"]  # it keeps what streaming-llm keeps
            style.draw(axes, of_panel, looks, "label", "percent", step=0.02)
            axes.axhline(0, **style.REFERENCE)
            what = "aware, near kept" if near == NEAR_KEPT else "blind, near read again"
            axes.set_title(f"{text}: {what}", loc="left")
        of_near[0].set_ylabel("loss over full cache\n[nats per token]")
    result = next(iter(cells.values()))
    style.log_axis(panels[0][0], [100 * budget for budget in result.settings.budgets])
    for axes in panels[-1]:
        axes.set_xlabel("budget [% of far keys]")
    style.add_legend(drawn, looks)
    lengths = result.settings.contexts
    heading = f"{result.settings.model.name}, N {lengths.n_long:,}, M {lengths.n_short}"
    style.add_heading(drawn, heading, style.says_intervals("bars", rows))
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables of every cell; write them, and draw the figure, where that is asked for."""
    parser = study_parser(__doc__, HERE, figures=True)
    parser.add_argument("command", nargs="?", choices=("collect",), metavar="collect")
    parser.add_argument("of", nargs="?", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    if options.command:
        collect(options.of, options.records)
        return
    study = load_cells(options.records)
    tables = Tables(percent=False, digits=2)  # of nats
    for cell, result in study.items():
        if kind_of(cell) == "needles":
            print_needles(tables, cell, result, options.records)
        else:
            print_cell(tables, cell, result)
    of_all = pooled(study)
    for cell, result in of_all.items():
        print_cell(tables, cell, result)
    print_verdicts(study, of_all)
    print_lengths(tables, {**study, **of_all})
    if options.numbers and tables.frames:
        tables.save(options.numbers)
    drawn = figure(study) if options.figures else None
    if drawn is not None:
        style.save_figure(drawn, options.figures / "policies.png")


if __name__ == "__main__":
    main()
