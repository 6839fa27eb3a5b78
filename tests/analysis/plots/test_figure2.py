"""Figure 2: what is drawn is what the summary says, and it is drawn without the model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D

from analysis.plots import figure2 as plots
from analysis.plots import style
from analysis.plots.dependencies import tokens_needed_figure
from analysis.records.results import LENGTH
from analysis.stats.recovery import BEST
from analysis.stats.summary import summarize
from tests.support.made_up_records import MEASURED, made_up_records
from tests.support.made_up_summary import (
    EVERY_SELECTOR,
    FEW_SELECTORS,
    KS,
    interval,
    made_up_summary,
    without_certainty,
)

SCRIPT = Path(__file__).parents[3] / "scripts" / "figure2.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_up_records(path := tmp_path_factory.mktemp("records"))
    return path


@pytest.fixture(scope="module")
def summary() -> dict:
    return made_up_summary(FEW_SELECTORS)


@pytest.fixture(scope="module")
def panels(summary: dict) -> list[Axes]:
    return plots.figure2(summary).axes


def curve(axes: Axes, label: str) -> Line2D:
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def y_of(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def values(summary: dict, selector: str, key: str, bound: str = "value") -> list[float]:
    return [per_k[key][bound] for per_k in summary["selectors"][selector].values()]


def layout(value: Any) -> Any:
    """The keys of a summary, of lists the first item's; numbers and what depends on the machine left out."""
    if isinstance(value, dict):
        return {key: layout(each) for key, each in value.items() if key != "settings"}
    return [layout(value[0])] if isinstance(value, list) and value else None


def missing(needed: Any, found: Any, where: str = "") -> list[str]:
    """What ``needed`` has and ``found`` has not."""
    if isinstance(needed, dict):
        names = [f"{where}/{key}" for key in needed if key not in found]
        return names + [
            one
            for key in needed
            if key in found
            for one in missing(needed[key], found[key], f"{where}/{key}")
        ]
    return missing(needed[0], found[0], where) if isinstance(needed, list) else []


def test_the_hand_made_summary_is_laid_out_like_a_real_one(tmp_path: Path) -> None:
    real = summarize(made_up_records(tmp_path), 100)
    hand_made = made_up_summary((*MEASURED, BEST))
    assert missing(layout(hand_made), layout(real)) == []
    assert set(hand_made["settings"]) <= set(real["settings"])
    assert list(hand_made["selectors"]) == list(real["selectors"])
    assert list(hand_made["distances"]["selectors"]) == list(real["distances"]["selectors"])
    assert list(hand_made["tokens_needed"]["selectors"]) == list(real["tokens_needed"]["selectors"])


def test_curves_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    for selector in FEW_SELECTORS:
        for axes, keys in ((panels[0], ("loss", "placebo_loss")), (panels[1], ("net_recovery",))):
            for key in keys:
                line = curve(axes, f"{selector} {key}")
                assert np.asarray(line.get_xdata()).tolist() == list(KS)
                assert y_of(line) == values(summary, selector, key)
    for key in ("loss_short", "loss_long"):
        assert y_of(curve(panels[0], key)) == [summary[key]["value"]] * 2


def test_bands_are_the_intervals(summary: dict, panels: list[Axes]) -> None:
    bands = [band for band in panels[1].collections if isinstance(band, PolyCollection)]
    assert len(bands) == len(FEW_SELECTORS)
    for selector, band in zip(FEW_SELECTORS, bands, strict=True):
        drawn = np.asarray(band.get_paths()[0].vertices)[:, 1]
        low, high = (values(summary, selector, "net_recovery", bound) for bound in ("low", "high"))
        for expected in (*low, *high):
            assert np.isclose(drawn, expected).any()


def test_many_curves_have_bars_beside_each_other_instead() -> None:
    summary = made_up_summary(EVERY_SELECTOR)
    axes = plots.figure2(summary).axes[1]
    assert not [band for band in axes.collections if isinstance(band, PolyCollection)]
    places = []
    container: Any
    for selector, container in zip(EVERY_SELECTOR, axes.containers, strict=True):
        line = curve(axes, f"{selector} net_recovery")
        assert y_of(line) == values(summary, selector, "net_recovery")
        x = np.asarray(line.get_xdata())
        assert (abs(np.log2(x / KS)) < 0.25).all()  # nearer to its own k than to the next
        places.append(x.tolist())
        (bars,) = container.lines[2]
        ends = np.array([path.vertices for path in bars.get_paths()])
        np.testing.assert_allclose(ends[:, 0, 0], x)
        for end, bound in enumerate(("low", "high")):
            np.testing.assert_allclose(ends[:, end, 1], values(summary, selector, "net_recovery", bound))
    assert len(set(map(tuple, places))) == len(EVERY_SELECTOR)


def test_placebo_is_dashed_and_hollow(summary: dict, panels: list[Axes]) -> None:
    for selector, (colour, marker, _) in style.selector_styles(FEW_SELECTORS).items():
        line = curve(panels[0], f"{selector} placebo_loss")
        assert (line.get_color(), line.get_marker()) == (colour, marker)
        assert line.is_dashed() and line.get_markerfacecolor() == "white"
        assert curve(panels[0], f"{selector} loss").get_markerfacecolor() == colour


def bars_of(axes: Axes) -> dict[str, tuple[list, list, list]]:
    """Label to value, lower and upper end of the error bars of panel (c)."""
    found = {}
    container: Any
    for container in axes.containers:
        points, _, (bars,) = container.lines
        ends = np.array([path.vertices[:, 1] for path in bars.get_paths()])
        found[container.get_label()] = (list(points.get_ydata()), *ends.T.tolist())
    return found


def test_bins_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    bars = bars_of(panels[2])
    assert list(bars) == [
        f"{name} {kind}"
        for name in ("leave-one-out", "random", "nearest")
        for kind in ("recovery", "placebo_recovery")
    ]
    for label, (middle, low, high) in bars.items():
        name, kind = label.split()
        expected = [each["selectors"][name][kind] for each in summary["gain_bins"]["bins"]]
        for drawn, bound in ((middle, "value"), (low, "low"), (high, "high")):
            np.testing.assert_allclose(drawn, [each[bound] for each in expected])
    ticks = [tick.get_text() for tick in panels[2].get_xticklabels()]
    counts = [each["targets"] for each in summary["gain_bins"]["bins"]]
    assert ticks == [f"{name}\nn = {n}" for name, n in zip(("1–2", "2–3", "3–5", "> 5"), counts, strict=True)]


def test_axes_name_quantity_and_unit(panels: list[Axes]) -> None:
    assert panels[0].get_ylabel() == "mean loss [nats per token]"
    assert "[fraction of $L_{short} - L_{long}$]" in panels[1].get_ylabel()
    assert panels[2].get_xlabel().endswith("[nats]") and "k = 4" in panels[2].get_title("left")
    for axes in panels[:2]:
        assert "[far tokens" in axes.get_xlabel() and axes.get_xscale() == "log"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "8"]


@pytest.mark.parametrize("selectors", [FEW_SELECTORS, EVERY_SELECTOR])
def test_legend_is_outside_and_names_everything(selectors: tuple[str, ...]) -> None:
    figure = plots.figure2(made_up_summary(selectors))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    certificate = "best of the selectors: existence certificate"
    assert names == [
        *(certificate if name == BEST else name for name in selectors),
        "placebo far context: dashed, hollow",
    ]
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    boxes: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
    assert box.y1 <= min(box.y0 for box in boxes)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_heading_says_what_was_measured(summary: dict) -> None:
    text = plots.describe(summary)
    parts = ("N = 128, M = 16", "2,400 targets", "604 documents", "258 with", "1 nat ", "(10.8 %)")
    assert [part for part in parts if part not in text] == []
    assert "measured so far" not in text and "cross-fit" not in text
    assert "(9 measured so far)" in plots.describe(made_up_summary(complete=False, targets_measured=9))
    assert "cross-fit" in plots.describe(made_up_summary(crossfit=True))


def test_heading_stays_inside_a_narrow_figure() -> None:
    summary = made_up_summary(("attention",), crossfit=True, complete=False)
    for figure in (tokens_needed_figure(summary), plots.figure2(summary, length_json())):
        figure.draw_without_rendering()
        heading: Any = figure._suptitle  # type: ignore[attr-defined]
        assert heading.get_text().replace("\n", " ") == plots.describe(summary)
        assert heading.get_window_extent().x1 <= figure.bbox.x1
        boxes: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
        assert heading.get_window_extent().y0 >= max(box.y1 for box in boxes)


def test_styles_are_stable_and_distinct() -> None:
    alone = style.selector_styles(["greedy"])["greedy"]
    styles = style.selector_styles([*EVERY_SELECTOR, "oracle"])
    assert styles["greedy"] == alone
    assert len({colour for colour, _, _ in styles.values()}) == len(styles)
    assert len({marker for _, marker, _ in styles.values()}) == len(styles)
    for name in (BEST, "leave-one-out@gradient:32", "greedy@gradient:32", "oracle"):
        others = [style for other, style in styles.items() if other != name]
        for part in range(3):
            assert styles[name][part] not in [style[part] for style in others], name


def luminance(colour: Any) -> float:
    red, green, blue = matplotlib.colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_every_colour_is_seen_on_white_and_in_grey() -> None:
    colours = [colour for colour, _, _ in style.selector_styles(EVERY_SELECTOR).values()]
    assert max(map(luminance, colours)) < 0.72


def test_other_selectors_and_no_intervals_can_be_drawn(tmp_path: Path) -> None:
    """A single selector without controls, of one document: no interval exists, and no bar is drawn."""
    summary = without_certainty(made_up_summary(("attention",)))
    panels = plots.figure2(summary).axes
    for middle, low, high in bars_of(panels[2]).values():
        assert np.isfinite(middle).all() and np.isnan(low).all() and np.isnan(high).all()
    style.save_figure(plots.figure2(summary), tmp_path)


def length_json() -> dict:
    edges = [64, 128, 256, 513]
    at_lengths = [
        {"length": n, "loss_nats": interval(3.0, 0.1), "rise_nats": interval(0, 0)} for n in (128, 256, 512)
    ]
    models = [
        {
            "label": label,
            "checkpoints": [
                {
                    "checkpoint": "runs/a", "checkpoint_sha256": "a" * 64, "parameters": 1000, "training_seed": 1,
                    "rope_scaling": None, "training_length": 128, "position_target": target,
                    "position_scheme": "pose", "at_lengths": at_lengths,
                }
            ],
            "at_lengths": at_lengths,
            "bins": [
                {"from": low, "to": high, "loss_nats": interval(loss, 0.1)}
                for low, high, loss in zip(edges, edges[1:], losses, strict=False)
            ],
        }
        for label, target, losses in (("RoPE", None, (3.0, 2.9, 4.0)), ("RoPE + PoSE", 512, (3.1, 3.0, 2.8)))
    ]  # fmt: skip
    settings = {"lengths": [128, 256, 512], "windows_measured": 20, "documents": 9}
    return LENGTH.stamped({"settings": settings, "models": models})


def test_loss_by_position_is_the_fourth_panel(summary: dict) -> None:
    panels = plots.figure2(summary, length_json()).axes
    assert [axes.get_title("left")[:3] for axes in panels] == ["(a)", "(b)", "(c)", "(d)"]
    places = [axes.get_subplotspec() for axes in panels]
    assert [(each.rowspan.start, each.colspan.start) for each in places if each] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    assert y_of(curve(panels[3], "RoPE + PoSE")) == [3.1, 3.0, 2.8]


def test_saved_files_are_reproducible_and_leave_no_state(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    summary = made_up_summary()
    first = style.save_figure(plots.figure2(summary), tmp_path / "one")
    second = style.save_figure(plots.figure2(summary), tmp_path / "two")
    assert [path.name for path in first] == ["figure2.png", "figure2.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG") and first[1].read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["figure2.pdf", "figure2.png"]
    assert dict(matplotlib.rcParams) == before


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_writes_figures_summary_and_table(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "length.json").write_text(json.dumps(length_json()))
    out = tmp_path / "out"
    arguments = (folder, "--out", out, "--resamples", 1000, "--k", 2, "--length", tmp_path)
    result = run_script(*arguments)
    assert result.returncode == 0 and result.stderr == ""
    assert "leave-one-out" in result.stdout and "net [%]" in result.stdout
    figures = ("distances", "figure2", "kinds", "tokens_needed")
    names = [*(f"{name}.{kind}" for name in figures for kind in ("pdf", "png")), "summary.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["gain_bins"]["k"] == 2 and summary["settings"]["resamples"] == 1000
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert run_script(*arguments).returncode == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--k", 3], "k = 3 was not measured"),
        (["--length", "nowhere"], "scripts/length.py"),
        ([], "has no records"),
    ],
)
def test_script_refuses_in_one_line(folder: Path, tmp_path: Path, arguments: list, said: str) -> None:
    result = run_script(folder if arguments else tmp_path / "none", *arguments, "--out", tmp_path / "out")
    assert result.returncode == 1 and not (tmp_path / "out").exists()
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and said in result.stderr
