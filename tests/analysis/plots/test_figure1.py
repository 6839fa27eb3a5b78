"""Figure 1: what is drawn and written is what the records say."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from analysis.cli.figure1 import main
from analysis.plots.bound import bound_figure
from analysis.plots.figure1 import (
    SPAN,
    accuracy_by_length_figure,
    describe,
    first_errors_figure,
    scheme_comparison_figure,
)
from analysis.stats.bound import trained_error, try_bounds
from analysis.stats.exact_match import load_records, pool
from olmo_sparsity.util import provenance
from tests.analysis.stats.test_exact_match import wilson_by_hand
from tests.support.drawn import curve, legend_names
from tests.support.made_up_exact_match import record, row, write, write_schemes, write_sparse

SCRIPT = Path(__file__).parents[3] / "scripts" / "figure1.py"
SCHEMES = ["RoPE", "RoPE + PoSE", "coupled ids (oracle)", "Predictive Position Coupling"]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    write_sparse(folder := tmp_path_factory.mktemp("sparse"))
    return pool(load_records([folder]))


@pytest.fixture(scope="module")
def schemes(tmp_path_factory):
    write_schemes(folder := tmp_path_factory.mktemp("schemes"))
    return pool(load_records([folder]))


def is_inside(figure):
    """Whether everything stays on the page, and the legend clear of the panels."""
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    legend, heading = figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()
    across = all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in (*boxes, legend, heading))
    return across and legend.y0 >= 0 and legend.y1 <= min(box.y0 for box in boxes)


class TestAccuracyByLength:
    def test_panels_curves_and_bands_are_the_groups(self, sparse):
        figure = accuracy_by_length_figure(sparse)
        assert [axes.get_title("left") for axes in figure.axes] == [
            f"$K_{{train}}$ = {k}" for k in (4, 8, 12)
        ]
        for axes, group in zip(figure.axes, sparse, strict=True):
            bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
            assert len(bands) == len(group.curves) == 7
            for band, each in zip(bands, group.curves, strict=True):
                line = curve(axes, f"k = {each.k}")
                assert list(line.get_xdata()) == each.lengths
                np.testing.assert_allclose(
                    line.get_ydata(), [100 * point.exact.value for point in each.points]
                )
                assert line.is_dashed() == (each.k > group.settings.k_train)
                drawn = np.asarray(band.get_paths()[0].vertices)[:, 1]
                for point in each.points:
                    assert np.isclose(drawn, 100 * point.exact.low).any()
                    assert np.isclose(drawn, 100 * point.exact.high).any()
            (chance,) = [line for line in axes.lines if list(line.get_ydata()) == [50, 50]]
            assert chance.get_linestyle() == ":"
            assert axes.patches[0].get_extents().width > 0
            (x0, x1) = sorted({x for x, _ in axes.patches[0].get_corners()})
            assert (x0, x1) == (20, 50)
        assert legend_names(figure)[-3:] == ["$k > K_{train}$", "trained lengths", "chance"]
        assert describe(sparse).startswith(
            "RoPE + PoSE; 3 training seeds; 3,000 steps; 600 samples a point; "
        )
        assert is_inside(figure)

    def test_steps_after_other_weights_are_those_of_the_last_stage(self, tmp_path):
        write(tmp_path / "a", record([row(20, 190, 4, (10, 0, 0))], initial_weights=True))
        assert "; 3,000 steps of the last stage; " in describe(pool(load_records([tmp_path])))

    def test_chance_of_planted_labels_and_what_else_differs(self, tmp_path):
        rows = [row(20, 190, 4, (10, 0, 0)), row(100, 100, 4, (100, 0, 0))]
        even = {"label_function": "sum", "planted_distribution": "uniform", "num_planted": 5}
        for name, changes in {"a": even, "b": {**even, "label_function": "max"}}.items():
            steps = {
                "max_duration": 100 if name == "a" else 200
            }  # follows from the label function: not named
            write(tmp_path / name, record(rows, "planted", task_changes=changes, options=steps))
        figure = accuracy_by_length_figure(pool(load_records([tmp_path])))
        for axes, label, chance in zip(figure.axes, ("max", "sum"), ([], [[20, 20]]), strict=True):
            assert axes.get_title("left") == f"$K_{{train}}$ = 4\nlabel_function {label}"
            assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == ":"] == chance
        assert figure.axes[0].get_xlabel() == "prompt length l [tokens]"
        assert "Wilson" in figure._suptitle.get_text() and "bootstrap" not in figure._suptitle.get_text()


class TestSchemeComparison:
    def test_curves_multiples_and_labels(self, schemes):
        figure = scheme_comparison_figure(schemes)
        parity, assignment = figure.axes
        assert parity.get_title("left") == "Parity with scratchpad"
        assert (parity.get_xlabel(), assignment.get_xlabel()) == (
            "length n [bits]",
            "chain length [assignments]",
        )
        assert parity.get_ylabel() == "exact match [% of samples]" and parity.get_xscale() == "log"
        assert [text.get_text() for text in parity.texts] == ["1× = 20", "3×", "5×", "10×"]
        assert [text.get_text() for text in assignment.texts] == ["1× = 4", "3×"]
        marked = [line.get_xdata()[0] for line in parity.lines if line.get_linestyle() == ":"]
        assert marked == [20, 60, 100, 200]
        for group, axes in zip(schemes, [parity] * 4 + [assignment] * 4, strict=True):
            line = curve(axes, SCHEMES[schemes.index(group) % 4])
            np.testing.assert_allclose(
                line.get_ydata(), [100 * p.exact.value for p in group.curves[0].points]
            )
        assert legend_names(figure) == [*SCHEMES, "trained lengths"]
        assert is_inside(figure)

    def test_bars_of_first_errors_reach_what_is_not_exact(self, schemes):
        figure = first_errors_figure(schemes)
        assert legend_names(figure) == [
            "wrong token", "wrong id", "stops too early or late", "trained lengths",
        ]  # fmt: skip
        assert [axes.get_ylabel() for axes in figure.axes[::4]] == [
            "Parity with scratchpad:\nwrong [%]",
            "Variable assignment:\nwrong [%]",
        ]
        assert is_inside(figure)
        for group, axes in zip(schemes, figure.axes, strict=True):
            assert axes.get_title("left").replace("\n", " ") == SCHEMES[schemes.index(group) % 4]
            points = group.curves[0].points
            for container, sort in zip(axes.containers, ("token", "id", "stop"), strict=True):
                np.testing.assert_allclose(
                    [b.get_height() for b in container], [100 * p.wrong[sort] for p in points]
                )
            tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
            np.testing.assert_allclose(tops, [100 * (1 - point.exact.value) for point in points], atol=1e-9)

    def test_bars_are_shaded_at_trained_lengths_alone(self, tmp_path):
        rows = [row(length, 9) for length in (2, 5, 20, 40)]
        for folder, task in (("some", {}), ("none", {"train_length": [21, 39]})):
            write(tmp_path / folder, record(rows, "scratchpad_parity", task_changes=task))
        spans = {}
        for folder in ("some", "none"):
            (axes,) = first_errors_figure(pool(load_records([tmp_path / folder]))).axes
            patches = [each for each in axes.patches if each.get_alpha() == SPAN["alpha"]]
            spans[folder] = [sorted({x for x, _ in each.get_corners()}) for each in patches]
        assert spans == {"some": [[0.5, 2.5]], "none": []}

    def test_many_curves_of_a_scheme_differ_in_looks(self, tmp_path):
        for number, rotate in enumerate(("ids", "index", "none")):
            value = record([row(5, 9), row(40, 9)], "scratchpad_parity", scheme="predicted", rotate=rotate)
            write(tmp_path / str(number), value)
        figure = scheme_comparison_figure(pool(load_records([tmp_path])))
        lines = [curve(figure.axes[0], f"{SCHEMES[3]}, rotate {each}") for each in ("ids", "index", "none")]
        assert len({line.get_color() for line in lines}) == 3
        assert len({line.get_marker() for line in lines}) == 1  # that of the scheme, in every figure
        assert is_inside(figure)


class TestBoundFigure:
    def test_errors_limits_and_bounds_are_multiples(self, tmp_path):
        for longest, wrong in ((50, 8), (100, 2)):
            rows = [row(longest, 400 - wrong, 4, (wrong, 0, 0)), row(longest // 2, 400, 4)]
            rows += [row(longest * n, 400 - wrong * n, 4, (wrong * n, 0, 0)) for n in (2, 4)]
            task = {"train_length": [20, longest], "test_length": [20, 500]}
            write(tmp_path / str(longest), record([*rows, row(longest, 9, 6)], task_changes=task))
        tests = try_bounds([trained_error(group) for group in pool(load_records([tmp_path]))])
        figure = bound_figure(tests)
        (axes,) = figure.axes
        assert (
            axes.get_xscale() == axes.get_yscale() == "log" and axes.get_ylabel() == "error [multiples of δ]"
        )
        assert axes.get_title("left") == "$K_{train}$ = 4, k = 4\nδ: 0.02, 0.005"
        for longest in (50, 100):
            line = curve(axes, f"L = {longest}")
            np.testing.assert_allclose(line.get_xdata(), [0.5, 1, 2, 4])
            np.testing.assert_allclose(line.get_ydata(), [np.nan, 1, 2, 4])
            assert list(curve(axes, f"L = {longest}, none wrong").get_xdata()) == [0.5]
        lines = {
            name: [line for line in axes.lines if line.get_label() == name]
            for name in ("improved", "Theorem 4.3")
        }
        for line in lines["improved"]:  # c = 1/2: twice delta at twice L
            np.testing.assert_allclose(line.get_ydata(), np.asarray(line.get_xdata()) ** 2 / 2)
        far, near = (line.get_ydata()[-1] / line.get_xdata()[-1] ** 2 for line in lines["Theorem 4.3"][::-1])
        assert far == pytest.approx(8 * near), "it grows with L³"
        improved = next(line for line in lines["improved"] if line.get_ydata()[-1] > 7)
        assert improved.get_ydata()[-1] == pytest.approx(8), "that of L = 100 ends with its points"
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [2]
        assert {"L = 50", "L = 100", "improved: c (L′/L)² δ", "none wrong: upper limit"} <= set(
            legend_names(figure)
        )
        assert is_inside(figure)

    def test_curves_of_one_length_and_panels_of_one_scheme_are_told_apart(self, tmp_path):
        rows = [row(n, 200 - n // 2, 4, (n // 2, 0, 0)) for n in (20, 50, 100, 200)]
        for number, (spread, locality) in enumerate((s, m) for s in ("adjacent", "uniform") for m in (3, 12)):
            task = {"position_distribution": spread, "locality": locality}
            write(tmp_path / str(number), record(rows, task_changes=task))
        tests = try_bounds([trained_error(group) for group in pool(load_records([tmp_path]))])
        figure = bound_figure(tests)
        assert len(figure.axes) == 2
        for axes, spread in zip(figure.axes, ("adjacent", "uniform"), strict=True):
            assert spread in " ".join(axes.get_title("left").split())
            xs = [curve(axes, f"L = 50, $L_{{local}}$ = {m}").get_xdata() for m in (3, 12)]
            np.testing.assert_allclose(*xs)
        assert is_inside(figure)

    def test_the_heading_names_the_interval_of_the_bands(self, tmp_path):
        def heading(folder, seeds, told):
            rows = [row(n, 200 - n // 2, 4, (n // 2, 0, 0)) for n in (20, 50, 100, 200)]
            for each in rows[:told]:
                each |= {"mean_probability": each["exact"] / 200, "std_probability": 0.1}
            for seed in seeds:
                write(tmp_path / folder / str(seed), record(rows, seed=seed))
            tests = [trained_error(group) for group in pool(load_records([tmp_path / folder]))]
            return " ".join(bound_figure(try_bounds(tests))._suptitle.get_text().split())

        samples = "; 200 samples a point"
        assert heading("none", [1], 0).endswith(f"{samples}; bands: 95 %, Wilson")
        assert heading("some", [1], 2).endswith(samples)
        assert heading("one", [1], 4).endswith(f"{samples}; bands: 95 %, normal over samples")
        assert heading("two", [1, 2], 4).endswith("bands: 95 %, Student's t over seeds, normal over samples")

    def test_a_panel_for_each_k_train(self, sparse):
        figure = bound_figure(try_bounds([trained_error(group) for group in sparse]))
        for axes, k in zip(figure.axes, (4, 8, 12), strict=True):
            assert f"k = {k}\nδ: " in axes.get_title("left")
        assert is_inside(figure)


class TestScript:
    def test_json_and_table_hold_the_numbers(self, tmp_path, run_here):
        rows = [row(20, 196, 4, (4, 0, 0)), row(100, 150, 4, (50, 0, 0)), row(200, 120, 4, (80, 0, 0))]
        file = write(tmp_path / "in", record(rows))
        printed = run_here(SCRIPT, tmp_path / "in", "--out", tmp_path / "out", "--bound").stdout
        names = ["figure1-sparse_parity", "figure1-sparse_parity-bound"]
        expected = {"figure1.json", *(f"{name}.{kind}" for name in names for kind in ("png", "pdf"))}
        assert {path.name for path in (tmp_path / "out").iterdir()} == expected
        found = json.loads((tmp_path / "out" / "figure1.json").read_text())
        (one,) = found["curves"]
        assert (one["task"], one["k"], one["task_parameters"]["k_train"], one["seeds"]) == (
            "sparse_parity",
            4,
            4,
            [1],
        )
        assert [point["length"] for point in one["points"]] == [20, 100, 200]
        exact = one["points"][0]["exact"]
        assert exact["value"] == 0.98 and (exact["low"], exact["high"]) == pytest.approx(
            wilson_by_hand(196, 200)
        )
        assert one["points"][1]["wrong"] == {"token": 0.25, "id": 0, "stop": 0}
        [bound] = found["bounds"]
        assert bound["settings"] == "RoPE + PoSE" and bound["trained"][0]["delta"] == pytest.approx(0.02)
        fit = bound["improved"]
        assert fit["constant"] == pytest.approx(0.25 / 0.08)  # from 100; at 200 that is worse than guessing
        assert (fit["tested"], fit["empty"], fit["slack"]) == (0, 1, None) and "0 of 0 lengths" in printed
        assert (
            found["records"][0]["record"] == str(file) and found["records"][0]["weights_sha256"] == "a" * 64
        )
        assert {"commit", "versions"} == set(found["provenance"])
        assert (
            "k = 4, K_train = 4" in printed and "98.0 [95.0, 99.2]" in printed and "figure1.json" in printed
        )

    def test_coupled_tasks_from_the_command_line_without_torch(self, tmp_path):
        value = record([row(5, 9, None, (1, 0, 0)), row(40, 4, None, (1, 3, 2))], "scratchpad_parity")
        write(tmp_path / "in", value)
        heavy = {"torch", "accelerate", "deepspeed", "transformers", "olmo", "olmo_sparsity.training"}
        code = (
            "import runpy, sys\n"
            f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
            f"except SystemExit as end: sys.exit(end.code or ', '.join({heavy} & set(sys.modules)))"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "in"), "--out", str(tmp_path / "out")]
        result = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
        assert result.stderr.strip() == ""
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            "figure1-errors.pdf", "figure1-errors.png", "figure1-schemes.pdf", "figure1-schemes.png", "figure1.json",
        ]  # fmt: skip

    def test_the_commit_is_that_before_the_figures_are_written(self, tmp_path, monkeypatch):
        write(tmp_path / "in", record([row(5, 9, None, (1, 0, 0))], "scratchpad_parity"))
        out = tmp_path / "out"  # in a checkout figures are tracked: drawn again, they count as changes
        monkeypatch.setattr(provenance, "current_commit", lambda: "dirty" if out.exists() else "clean")
        monkeypatch.setattr(sys, "argv", ["figure1", str(tmp_path / "in"), "--out", str(out)])
        main()
        assert json.loads((out / "figure1.json").read_text())["provenance"]["commit"] == "clean"

    def test_bad_input_is_refused_before_anything_is_written(self, tmp_path, run_here):
        write(tmp_path / "in", record([row(100, 3, 4)]))
        write(tmp_path / "coupled", record([row(5, 9)], "scratchpad_parity"))
        for arguments, said in (
            ([tmp_path / "in", "--bound"], "no length from 20 to 50"),
            ([tmp_path / "in", tmp_path / "nowhere"], "nowhere is missing"),
            ([tmp_path / "coupled", "--bound"], "--bound is for tasks with planted tokens"),
        ):
            assert said in run_here(SCRIPT, *arguments, "--out", tmp_path / "out").stderr
        assert not (tmp_path / "out").exists()
