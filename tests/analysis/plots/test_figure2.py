"""Figure 2: what is drawn is what the summary says, and it is drawn without the model."""

import importlib
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.plots import figure2 as plots
from analysis.plots import style
from analysis.plots.dependencies import all_figures, tokens_needed_figure
from analysis.stats.recovery import BEST
from analysis.stats.summary import summarize
from olmo_sparsity.util.errors import UserError
from tests.support.drawn import curve, intervals_drawn, legend_names
from tests.support.made_up_length import made_up_length
from tests.support.made_up_records import MEASURED, made_up_examples, made_up_records, with_further
from tests.support.made_up_summary import (
    EVERY_SELECTOR,
    FEW_SELECTORS,
    KS,
    made_up_summary,
    without_certainty,
)
from tests.support.refusals import assert_refused
from tests.support.slow import slow_but

SCRIPT = "scripts/figure2.py"
SHOWN = ("leave-one-out", "attention", "random", "nearest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_up_records(path := tmp_path_factory.mktemp("records"))
    return path


@pytest.fixture(scope="module")
def summary() -> dict:
    return made_up_summary()


@pytest.fixture(scope="module")
def panels(summary: dict) -> list[Axes]:
    return plots.figure2(summary).axes


def y_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def values(summary: dict, selector: str, key: str, bound: str = "value") -> list[float]:
    return [per_k[key][bound] for per_k in summary["selectors"][selector].values()]


def shape_of(value: Any) -> Any:
    """The keys of a summary, of lists the first item's; numbers and what depends on the machine left out."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items() if key != "settings"}
    return [shape_of(value[0])] if isinstance(value, list) and value else None


def missing(needed: Any, found: Any, where: str = "") -> list[str]:
    """What ``needed`` has and ``found`` has not."""
    if isinstance(needed, dict):
        absent = [f"{where}/{key}" for key in needed if key not in found]
        both = [key for key in needed if key in found]
        return absent + [one for key in both for one in missing(needed[key], found[key], f"{where}/{key}")]
    return missing(needed[0], found[0], where) if isinstance(needed, list) else []


def test_the_hand_made_summary_is_laid_out_like_a_real_one(tmp_path: Path) -> None:
    records = with_further(made_up_records(tmp_path))
    texts = made_up_examples(records.targets.target_id[records.over], 128, 16)
    real = summarize(replace(records, examples=texts), 100)
    hand_made = made_up_summary((*MEASURED, BEST))
    assert missing(shape_of(hand_made), shape_of(real)) == []
    assert set(hand_made["settings"]) <= set(real["settings"])
    for part in (lambda each: each, lambda each: each["distances"], lambda each: each["tokens_needed"]):
        assert list(part(hand_made)["selectors"]) == list(part(real)["selectors"])


def test_the_default_attention_and_the_controls_are_shown_and_the_rest_in_a_second_figure(
    summary: dict,
) -> None:
    def drawn(figure: Any) -> list[str]:
        labels = [str(line.get_label()) for line in figure.axes[1].lines]
        return [label.removesuffix(" net_recovery") for label in labels if label.endswith("net_recovery")]

    assert drawn(plots.figure2(summary)) == list(SHOWN)
    further = [name for name in EVERY_SELECTOR if name not in SHOWN]
    assert drawn(plots.further_figure(summary)) == ["leave-one-out", *further]
    assert plots.further_figure(made_up_summary(SHOWN)) is None
    assert drawn(plots.figure2(summary, selectors=["greedy", "best"])) == ["greedy", "best"]
    with pytest.raises(UserError, match="no records of selector shapley; choose from leave-one-out"):
        plots.figure2(summary, selectors=["shapley"])


def test_curves_and_bars_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    for selector in SHOWN:
        for axes, keys in ((panels[0], ("loss", "placebo_loss")), (panels[1], ("net_recovery",))):
            for key in keys:
                line = curve(axes, f"{selector} {key}")
                assert y_of(line) == values(summary, selector, key)
                x = np.asarray(line.get_xdata())
                assert (abs(np.log2(x / KS)) < 0.25).all()  # nearer to its own k than to the next
    for key in ("loss_short", "loss_long"):
        assert y_of(curve(panels[0], key)) == [summary[key]["value"]] * 2
    places = set()
    for selector, container in zip(SHOWN, panels[1].containers, strict=True):
        (bars,) = container.lines[2]  # type: ignore[attr-defined]
        ends = np.array([path.vertices for path in bars.get_paths()])
        places.add(tuple(ends[:, 0, 0]))
        for end, bound in enumerate(("low", "high")):
            np.testing.assert_allclose(ends[:, end, 1], values(summary, selector, "net_recovery", bound))
    assert len(places) == len(SHOWN)  # beside each other: none hides another


@pytest.mark.parametrize(("high", "places"), [(3.0, 1), (6.0, 2)])
def test_intervals_of_l_short_and_l_long_that_overlap_stand_beside_each_other(
    high: float, places: int
) -> None:
    summary = made_up_summary()
    summary["loss_short"] = {"value": 5.5, "low": 5.0, "high": 7.0}
    summary["loss_long"] = {"value": 2.5, "low": 2.0, "high": high}
    axes = plots.figure2(summary).axes[0]
    bars = [each.lines[2][0] for each in axes.containers[-2:]]  # type: ignore[attr-defined]
    assert len({bar.get_paths()[0].vertices[0, 0] for bar in bars}) == places


def labels_of(axes: Axes) -> list[str]:
    """Of the error bars of panel (c)."""
    return [each.get_label() for each in axes.containers]


def test_bins_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    labels, names = labels_of(panels[2]), ("leave-one-out", "random", "nearest")
    assert labels == [f"{name} {kind}" for name in names for kind in ("recovery", "placebo_recovery")]
    for label in labels:
        name, kind = label.split()
        expected = [each["selectors"][name][kind] for each in summary["gain_bins"]["bins"]]
        wanted = [[each[bound] for bound in ("value", "low", "high")] for each in expected]
        np.testing.assert_allclose(intervals_drawn(panels[2], label, "y"), wanted)
    ticks = [tick.get_text() for tick in panels[2].get_xticklabels()]
    counts = [each["targets"] for each in summary["gain_bins"]["bins"]]
    assert ticks == [f"{name}\nn={n}" for name, n in zip(("1–2", "2–3", "3–5", "> 5"), counts, strict=True)]
    assert panels[2].get_title("left").endswith("k = 4\nleave-one-out, random, nearest")


def test_loss_by_position_is_the_fourth_panel(summary: dict) -> None:
    panels = plots.figure2(summary, made_up_length()).axes
    assert [axes.get_title("left")[:3] for axes in panels] == ["(a)", "(b)", "(c)", "(d)"]
    places = [axes.get_subplotspec() for axes in panels]
    assert [(each.rowspan.start, each.colspan.start) for each in places if each] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert y_of(curve(panels[3], "RoPE + PoSE")) == [3.1, 3.0, 2.8]


@pytest.mark.parametrize("width", slow_but([style.COLUMN, style.PAGE], style.COLUMN))
@pytest.mark.parametrize(
    "selectors",
    [
        FEW_SELECTORS,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (("attention",), EVERY_SELECTOR)),
    ],
)
def test_figures_can_be_printed_at_their_width(selectors: tuple[str, ...], width: float) -> None:
    """All text is 7 points or more and on the page; the legend and the heading are clear of the panels."""
    length = made_up_length() if "attention" in selectors else None
    for name, figure in all_figures(made_up_summary(selectors), length, width=width).items():
        assert figure.get_figwidth() <= width
        figure.draw_without_rendering()
        texts: list[Any] = [each for each in figure.findobj(matplotlib.text.Text) if each.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 7, name
        (legend,) = figure.legends
        heading: Any = figure._suptitle  # type: ignore[attr-defined]
        boxes: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
        for box in (*boxes, legend.get_window_extent(), heading.get_window_extent()):
            assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, name
        assert legend.get_window_extent().y1 <= min(box.y0 for box in boxes), name
        assert heading.get_window_extent().y0 >= max(box.y1 for box in boxes), name
        assert "placebo" in " ".join(legend_names(figure)), name


def test_heading_says_what_was_measured_and_may_be_left_out(summary: dict) -> None:
    text = plots.describe(summary)
    parts = (
        "N = 128, M = 16",
        "2,400 targets",
        "604 documents",
        "258 with",
        "1 nat ",
        "(10.8 %; 2.0 % below",
        "48 % of the net gain)",
    )
    assert [part for part in parts if part not in text] == []
    assert "others lose" not in text
    held = {"value": 1.05, "low": 0.96, "high": 1.15}
    more = {**summary, "thresholding": {**summary["thresholding"], "share_of_net_gain": held}}
    assert "105 % of the net gain, as others lose)" in plots.describe(more)
    assert "measured so far" not in text and "cross-fit" not in text
    assert "(9 measured so far)" in plots.describe(made_up_summary(complete=False, targets_measured=9))
    long = made_up_summary(("attention",), crossfit=True, complete=False)
    heading = tokens_needed_figure(long, width=style.COLUMN).get_suptitle()
    assert heading.replace("\n", " ") == plots.describe(long) and "cross-fit" in heading
    assert not any(figure.get_suptitle() for figure in all_figures(summary, heading=False).values())


def test_selectors_and_encodings_have_looks_of_their_own() -> None:
    alone = style.selector_styles(["greedy"])["greedy"]
    selectors = style.selector_styles([*EVERY_SELECTOR, "oracle"])
    assert selectors["greedy"] == alone
    assert len({colour for colour, _, _ in selectors.values()}) == len(selectors)
    assert len({marker for _, marker, _ in selectors.values()}) == len(selectors)
    for name in (BEST, "leave-one-out@gradient:32", "greedy@gradient:32", "oracle"):
        others = [each for other, each in selectors.items() if other != name]
        for part in range(3):
            assert selectors[name][part] not in [each[part] for each in others], name
    luminance = [
        np.dot(matplotlib.colors.to_rgb(colour), (0.299, 0.587, 0.114)) for colour, *_ in selectors.values()
    ]
    assert max(luminance) < 0.72  # seen on white, and in grey
    labels = (
        "RoPE",
        "RoPE random start",
        "RoPE + PoSE",
        "NoPE",
        "ALiBi",
        "RoPE YaRN x 2",
        "RoPE YaRN x 4",
        "x",
        "y",
    )
    models = style.model_styles({label: style.encoding_of(label) for label in labels})
    assert len(set(models.values())) == len(labels)
    assert not {each[0] for each in models.values()} & {each[0] for each in selectors.values()}
    assert models["RoPE YaRN x 2"][1] == models["RoPE YaRN x 4"][1]


@pytest.mark.parametrize(
    ("label", "scheme", "encoding"),
    [
        ("ALiBi", "contiguous", "alibi"), ("RoPE YaRN x 2", "contiguous", "yarn"), ("0.3 M", "pose", "pose"),
        ("RoPE random start", None, "random_start"), ("RoPE", None, "contiguous"), ("run-7", None, None),
    ],
)  # fmt: skip
def test_an_encoding_is_read_off_label_and_scheme(
    label: str, scheme: str | None, encoding: str | None
) -> None:
    assert style.encoding_of(label, scheme) == encoding


def test_no_intervals_can_be_drawn() -> None:
    """A single selector without controls, of one document: no interval exists, and no bar is drawn."""
    axes = plots.figure2(without_certainty(made_up_summary(("attention",)))).axes[2]
    for label in labels_of(axes):
        drawn = intervals_drawn(axes, label, "y")
        assert np.isfinite(drawn[:, 0]).all() and np.isnan(drawn[:, 1:]).all()


def test_saved_files_are_reproducible_and_leave_no_state(tmp_path: Path) -> None:
    summary = made_up_summary(("attention",))
    before = dict(matplotlib.rcParams)
    kinds = ("png", "pdf", "svg")
    first = style.save_figure(tokens_needed_figure(summary), tmp_path / "one", "figure2", kinds)
    second = style.save_figure(tokens_needed_figure(summary), tmp_path / "two", "figure2", kinds)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG") and first[1].read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        f"figure2.{kind}" for kind in sorted(kinds)
    ]
    assert dict(matplotlib.rcParams) == before


def test_script_writes_figures_summary_and_table(folder: Path, tmp_path: Path, run_here: Any) -> None:
    (tmp_path / "length.json").write_text(json.dumps(made_up_length()))
    out = tmp_path / "out"
    options = ("--format", "svg", "--width", 3.25, "--no-title")
    result = run_here(
        SCRIPT, folder, "--out", out, "--resamples", 1000, "--k", 2, "--length", tmp_path, *options
    )
    assert result.returncode == 0 and result.stderr == ""
    assert "leave-one-out" in result.stdout and "net [%]" in result.stdout
    figures = ("distances", "figure2", "figure2-selectors", "kinds", "tokens_needed")
    names = [*(f"{name}.svg" for name in figures), "summary.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gain_bins"]["k"] == 2 and summary["settings"]["resamples"] == 1000
    assert 'width="234pt"' in (out / "figure2.svg").read_text()[:2000]  # 3.25 inches


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--k", 3], 1, "k = 3 was not measured"),
        (["--length", "nowhere"], 1, "scripts/length.py"),
        (["--selectors", "shapley"], 1, "no records of selector shapley"),
        (["--format", "gif"], 2, "'gif' is none of png, pdf and svg"),
        (["--width", 1], 2, "1 inches are not 3 to 20"),
        ([], 1, "has no records"),
    ],
)
def test_script_refuses_in_one_line(
    folder: Path, tmp_path: Path, arguments: list, code: int, said: str, run_here: Any
) -> None:
    result = run_here(
        SCRIPT, folder if arguments else tmp_path / "none", *arguments, "--out", tmp_path / "out"
    )
    assert_refused(result, said, code)
    assert not (tmp_path / "out").exists()


WITH_EXAMPLES = "compare figure1 figure2 figure6 influence ladder plot_length plot_metrics"


@pytest.mark.parametrize("command", WITH_EXAMPLES.split())
def test_the_examples_of_help_are_commands_that_the_parser_takes(command: str) -> None:
    """A line that goes on ends with one backslash; a docstring that lost it would join or split the command."""
    parser = importlib.import_module(f"analysis.cli.{command}")._parser()
    text = parser.format_help().replace("\\\n", " ")
    called = rf"  (python scripts/{command}\.py|olmo-sparsity {command}) "
    examples = [re.sub(called, "", line) for line in text.splitlines() if re.match(called, line)]
    assert examples
    for arguments in examples:
        parser.parse_args(shlex.split(arguments))
