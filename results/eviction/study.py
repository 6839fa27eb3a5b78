"""The numbers of the study on eviction: which policies keep what the next predictions need.

    python results/eviction/study.py                              prints the tables
    python results/eviction/study.py --figures results/eviction   draws the figure, too
    python results/eviction/study.py collect OUT                  adds what run.sh has measured so far to this folder

A cell that is not complete has the blocks that were judged, in the order in which they were drawn.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from analysis.cache_eviction import numbers
from analysis.cache_eviction.figure import policy_looks
from analysis.cache_eviction.record import AWARE, BLIND, HEAD, PARTS, TARGETS
from analysis.cache_eviction.result import EvictionResult
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.figures import style
from analysis.saved import without_folders
from analysis.stats.tables import INTERVAL, show
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
POOLED = ("horizon", "n4096")
"""Cells of few blocks, which are also shown with all texts as one."""
Study = Mapping[str, EvictionResult]


def collect(out: Path, records: Path) -> None:
    """Copy what is judged of every cell in a folder of run.sh, complete or not, without the folders of its machine."""
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        paths = [folder] if (folder / HEAD).is_file() else sorted((folder / PARTS).glob("*/"))
        parts = [EvictionResult.load(path) for path in paths if (path / HEAD).is_file()]
        if not parts:
            continue
        without_folders(EvictionResult.join(parts)).save(records / folder.name)
        if (folder / PLACES).is_file():
            shutil.copy(folder / PLACES, records / folder.name)


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
class Tables:
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

    def losses(self, near: str) -> pd.DataFrame:
        """Loss over full of everything that was judged, the best at `budget_of` first, and what is best found."""
        frame = self.summary
        frame = frame[(frame["name"] == numbers.LOSS) & (frame["near"] == near)]
        at_middle = frame[frame["budget"] == budget_of(self.result)].sort_values("value", kind="stable")
        order = {policy: number for number, policy in enumerate(at_middle["policy"])}
        frame = frame.sort_values("policy", key=lambda names: names.map(order), kind="stable")
        frames = [frame]
        if self.best_found is not None:
            best = self.best_found
            is_loss = (best["name"] == numbers.LOSS) & (best["near"] == near)
            frames.append(best[is_loss].assign(policy="best found"))
        return pd.concat([frame[["policy", "budget", *INTERVAL]] for frame in frames])

    def others(self, near: str) -> Iterator[tuple[str, pd.DataFrame]]:
        """The further numbers of `numbers.summary`, name and frame, at `budget_of`."""
        frame = self.summary
        frame = frame[(frame["near"] == near) & (frame["budget"] == budget_of(self.result))]
        for name in (numbers.KL, numbers.SHARE, numbers.TOP, numbers.SPEARMAN, numbers.OVERLAP):
            of_name = frame[frame["name"] == name]
            if len(of_name):
                yield name, of_name[["policy", *INTERVAL]]


def with_p(frame: pd.DataFrame) -> pd.DataFrame:
    """Differences for printing: p as text, which interval_text would take for a value."""
    shown = frame[["policy", "budget", *INTERVAL]].copy()
    shown.insert(2, "p_holm", [f"{p:.2g}" for p in frame["p_holm"]])
    return shown


def print_cell(cell: str, result: EvictionResult) -> None:
    """Print the tables of a cell."""
    tables = Tables(result)
    size = result.counts
    of_all = (
        f" of {result.settings.blocks_requested}" if size["blocks"] < result.settings.blocks_requested else ""
    )
    title = (
        f"{cell}: {size['targets']:,} targets, {size['blocks']}{of_all} blocks, {size.get('groups')} groups"
    )
    print("\n" + show(result.gain(), digits=2, title=title))
    for near in result.nears:
        what = f"{cell}, near {near}"
        over = tables.losses(near)
        print(
            "\n" + show(over, across="budget", percent=False, digits=2, title=f"{what}: loss over full, nats")
        )
        for name, frame in tables.others(near):
            is_share = not name.endswith("_nats") and name != numbers.SPEARMAN
            digits = 0 if is_share else 2
            print(
                "\n"
                + show(
                    frame,
                    percent=is_share,
                    digits=digits,
                    title=f"{what}, {100 * budget_of(result):g} %: {name}",
                )
            )
        judged = result.policies
        if (judged["near"] == near)[judged["policy"] == REFERENCE].any():
            frame = with_p(result.differences(REFERENCE, near))
            print("\n" + show(frame, percent=False, digits=2, title=f"{what}: less {REFERENCE}"))
        frame = result.aware_less_blind(near)
        if len(frame):
            print("\n" + show(with_p(frame), percent=False, digits=2, title=f"{what}: aware less blind"))
    tells = result.agreement_tells()
    if len(tells):
        tells = tells[["near", "budget", "name", *INTERVAL]]
        title = f"{cell}: rank correlation over policies of agreement with loss over full"
        print("\n" + show(tells, across="budget", percent=False, digits=1, title=title))
    if kind_of(cell) == "horizon":
        print_horizon(cell, result)
    elif kind_of(cell) in ("n256", "n1024"):
        print_where(cell, result)


def print_where(cell: str, result: EvictionResult) -> None:
    """Print where policies fail: by the gain of targets and their kind, as published, at one budget."""
    for name, across, frame in (
        ("gain", "above_nats", result.by_gain()),
        ("kind", "kind", result.by_kind()),
    ):
        frame = as_used(frame)
        frame = frame[frame["budget"] == budget_of(result)]
        counts = frame.drop_duplicates(across).set_index(across)["n_targets"].to_dict()
        title = f"{cell}, as used, by {name}; targets {counts}"
        print(
            "\n"
            + show(frame[["policy", across, *INTERVAL]], across=across, percent=False, digits=2, title=title)
        )


def as_used(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of every policy as it is used: near tokens are read again behind blind ones, and kept behind others."""
    is_blind = frame["sees"] == BLIND
    return frame[(is_blind & (frame["near"] == NEAR_REREAD)) | (~is_blind & (frame["near"] == NEAR_KEPT))]


def print_horizon(cell: str, result: EvictionResult) -> None:
    """Print losses by distance from the choice; and of the targets that the reference of the next 16 has not seen, what
    policies and references lose more than a reference."""
    frame = result.by_distance()
    frame = frame[(frame["near"] == NEAR_KEPT) & (frame["budget"] == budget_of(result))]
    print(
        "\n"
        + show(
            frame[["policy", "to_tokens", *INTERVAL]],
            across="to_tokens",
            percent=False,
            digits=2,
            title=f"{cell}: loss over full, nats, by distance from the choice, up to",
        )
    )
    names = [name for name in result.settings.references if name.startswith("leave-one-out-kl")]
    is_later = result.targets["place"] >= SEEN_BY_FIRST
    later = replace(result, targets=result.targets[is_later].reset_index(drop=True))
    for reference in names:
        frame = later.differences(reference, NEAR_KEPT)
        frame = frame[frame["policy"].isin(names) | (frame["sees"] != TARGETS)]
        shown = frame[["policy", "budget", *INTERVAL]]
        print(
            "\n"
            + show(
                shown,
                across="budget",
                percent=False,
                digits=2,
                title=f"{cell}, later targets: less {reference}",
            )
        )


def print_needles(cell: str, result: EvictionResult, records: Path) -> None:
    """Print the loss of both words, and the share of heads that keep them."""
    last = result.settings.contexts.targets_per_block - 1
    for name, place in (("asked for", 0), ("not asked for yet", last)):
        at_place = result.targets[result.targets["place"] == place].reset_index(drop=True)
        of_word = replace(result, targets=at_place)
        tables = Tables(of_word)
        print("\n" + show(of_word.gain(), digits=2, title=f"{cell}: the word {name}"))
        for near in result.nears:
            title = f"{cell}, near {near}: loss over full, nats, of the word {name}"
            print("\n" + show(tables.losses(near), across="budget", percent=False, digits=2, title=title))
    words = words_of(
        result.targets, read_json(records / cell / PLACES, "collect the cell again", expect=list)
    )
    frame = result.keeps(words)
    for (near, name), rows in frame.groupby(["near", "name"], sort=False):
        title = f"{cell}, near {near}: per cent of heads that keep the word {name}"
        print("\n" + show(rows[["policy", "budget", *INTERVAL]], across="budget", digits=0, title=title))


def words_of(targets: pd.DataFrame, places: Sequence[Mapping[str, int]]) -> pd.DataFrame:
    """Block, name and column of the words of every text, from the frame of targets and what `PLACES` has."""
    rows = []
    for block, text in targets.drop_duplicates("block")[["block", "text"]].itertuples(index=False):
        for name, column in places[text].items():
            rows.append({"block": block, "name": name, "column": column})
    return pd.DataFrame(rows)


def pooled(study: Study) -> dict[str, EvictionResult]:
    """Cells of few blocks, all texts as one, where there are two or more."""
    joined = {}
    for kind in POOLED:
        cells = {cell.split("-")[1]: result for cell, result in study.items() if kind_of(cell) == kind}
        if len(cells) > 1:
            joined[f"smollm2-all-{kind}"] = EvictionResult.pool(cells)
    return joined


def by_length(study: Study) -> pd.DataFrame:
    """What is left of the gain at one budget, near tokens read again, against N: policy, cell, value, low, high."""
    frames = []
    for cell, result in study.items():
        if kind_of(cell) in ("n256", "n1024", "n4096"):
            frame = result.summary()
            is_share = (frame["name"] == numbers.SHARE) & (frame["near"] == NEAR_REREAD)
            frame = frame[is_share & (frame["budget"] == budget_of(result))]
            frames.append(frame.assign(cell=cell)[["policy", "cell", *INTERVAL]])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


@matplotlib.rc_context(style.STYLE)
def figure(study: Study, model: str = "smollm2") -> Figure | None:
    """Loss over full against the budget, a column a text, aware policies above and blind ones below.

    N 1,024, or 256 where that is not measured; None without cells.
    """
    for kind in ("n1024", "n256"):
        cells = {text: study[f"{model}-{text}-{kind}"] for text in TEXTS if f"{model}-{text}-{kind}" in study}
        if cells:
            break
    else:
        return None
    frames = []
    for text, result in cells.items():
        frame = result.summary()
        frames.append(frame[frame["name"] == numbers.LOSS].assign(text=text))
    rows = pd.concat(frames, ignore_index=True)
    rows["label"] = rows["policy"].str.replace(":blind=1", "", regex=False)
    rows["percent"] = 100 * rows["budget"]
    looks = policy_looks(list(rows["label"].unique()))
    drawn = style.new_figure(style.PAGE, 5.6)
    panels = drawn.subplots(2, len(cells), sharex=True, sharey=True, squeeze=False)
    for near, of_near in zip((NEAR_KEPT, NEAR_REREAD), panels, strict=True):
        for axes, text in zip(of_near, cells, strict=True):
            of_panel = rows[(rows["near"] == near) & (rows["text"] == text)]
            if near == NEAR_REREAD:
                of_panel = of_panel[of_panel["sees"] != AWARE]
            style.draw(axes, of_panel, looks, "label", "percent", step=0.02)
            axes.axhline(0, **style.REFERENCE)
            what = "aware, near tokens kept" if near == NEAR_KEPT else "blind, near tokens read again"
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
    """Print all tables of every cell, and draw the figure where a folder for it is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("collect",), metavar="collect")
    parser.add_argument("of", nargs="?", type=Path, metavar="OUT")
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    figures = "folder to draw the figure into (default: none is drawn)"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=figures)
    options = parser.parse_args(arguments)
    if options.command:
        collect(options.of, options.records)
        return
    study = load_cells(options.records)
    for cell, result in study.items():
        if kind_of(cell) == "needles":
            print_needles(cell, result, options.records)
        else:
            print_cell(cell, result)
    of_all = pooled(study)
    for cell, result in of_all.items():
        print_cell(cell, result)
    lengths = by_length(study | of_all)
    if len(lengths):
        title = f"near reread, {100 * MIDDLE:g} %: per cent of the gain that is left"
        print("\n" + show(lengths, across="cell", digits=0, title=title))
    drawn = figure(study) if options.figures else None
    if drawn is not None:
        style.save_figure(drawn, options.figures / "policies.png")


if __name__ == "__main__":
    main()
