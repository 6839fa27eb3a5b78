"""The ladder: points that join records and loss by position, what cannot be joined, and the script."""

import io
import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import rankdata, spearmanr

from analysis.plots.ladder import joint_figure, ladder_figure
from analysis.records.store import load_records
from analysis.records.trainings import join_trainings
from analysis.stats.ladder import by_model, correlations, model_point, with_needles
from analysis.stats.summary import summarize, summarize_all_targets
from analysis.tables.models import render_correlations, render_ladder
from olmo_sparsity.util.errors import UserError
from tests.support.made_up_length import SHAS, checkpoint, interval, length_json
from tests.support.made_up_records import made_up_manifest, made_up_targets, write_records
from tests.support.refusals import refused

SCRIPT = "scripts/ladder.py"
SETTINGS = {"selector": "leave-one-out", "k": 4, "times": 4, "n_long": 128, "n_short": 16, "tau_nats": 1.0}
MEASURED = length_json(
    checkpoint("a", "small", 0.4, 1000),
    checkpoint("b", "small", 0.5, 1000),
    checkpoint("a", "small, YaRN", 0.1, 1000, rope_scaling={"name": "yarn"}),
    checkpoint("c", "large", 0.2, 4000),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Records of a and b, two seeds; of c; and of a's targets evaluated with b."""
    folder, made = tmp_path_factory.mktemp("ladder"), {}
    for number, (name, changes) in enumerate((
        ("a", {"checkpoint_sha256": SHAS["a"]}),
        ("b", {"checkpoint_sha256": SHAS["b"], "training_seed": 2}),
        ("c", {"checkpoint_sha256": SHAS["c"]}),
        ("ab", {"checkpoint_sha256": SHAS["a"], "evaluation_checkpoint": "runs/b",
                "evaluation_checkpoint_sha256": SHAS["b"], "evaluation_training_seed": 2}),
    )):  # fmt: skip
        rng = np.random.default_rng(number)
        targets = made_up_targets(300, 30, np.random.default_rng(0), crossfit=name == "ab")
        write_records(folder / name, made_up_manifest(300, **changes), targets, rng)
        made[name] = folder / name
    return made


@pytest.fixture(scope="module")
def records(folders):
    return {name: load_records(folder) for name, folder in folders.items()}


def points_of(records, measured=MEASURED, names=("a", "b", "c", "ab"), beyond=(), **changes):
    options = {"selector": "leave-one-out", "k": 4, "times": 4, "resamples": 1000, "seed": 0, **changes}
    further = by_model(beyond, measured)
    return [
        model_point(each, measured, beyond=further.get(key), **options)
        for key, each in by_model([records[name] for name in names], measured).items()
    ]


def changed(records, **changes):
    return replace(records, manifest=replace(records.manifest, **changes))


def test_a_point_joins_what_was_measured_of_the_checkpoints_that_evaluate(records):
    points = points_of(records)
    assert [point["label"] for point in points] == ["small", "large", "small"]
    assert [point["crossfit"] for point in points] == [False, False, True]
    assert [point["parameters"] for point in points] == [1000, 4000, 1000]
    assert [point["rise_nats"]["value"] for point in points] == [0.45, 0.2, 0.5]
    assert [[one["rise_nats"]["value"] for one in point["seeds"]] for point in points] == [
        [0.4, 0.5],
        [0.2],
        [0.5],
    ]
    both = join_trainings([records["a"], records["b"]])
    for point, of in zip(points, (both, records["c"], records["ab"]), strict=True):
        found = summarize(of, 1000, 0)
        assert point["net_recovery"] == found["selectors"]["leave-one-out"]["4"]["net_recovery"]
        place = found["tokens_needed"]["ks"].index(4)
        assert point["k_suffices"] == found["tokens_needed"]["selectors"]["leave-one-out"]["true"][place]
    for one, name in zip(points[0]["seeds"], "ab", strict=True):
        own = summarize(records[name], 1000, 0)
        assert one["net_recovery"] == own["selectors"]["leave-one-out"]["4"]["net_recovery"]
        assert one["training_seed"] == ord(name) and one["checkpoint_sha256"] == SHAS[name]
    (point,) = points_of(records, names=["a"], times=2, k=1, selector="greedy")
    assert point["rise_nats"]["value"] == 0.2, "of a alone"
    assert point["net_recovery"] == point["seeds"][0]["net_recovery"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector": "nearby"}, "runs/a has no selector nearby; choose leave-one-out"),
        ({"k": 3}, "runs/a was not measured at k = 3; choose 1, 2, 4, 8"),
        ({"times": 3}, "runs/a was not measured at its window and 3 times that; give --lengths 128,384"),
        ({"measured": length_json(MEASURED["models"][2]["checkpoints"][0])}, "runs/a was not measured by position"),
        ({"measured": length_json(MEASURED["models"][1]["checkpoints"][0])}, "without scaling its RoPE"),
        ({"measured": length_json(checkpoint("a", "x", 1, 2, training_length=None))}, "window is not known"),
        ({"measured": length_json(checkpoint("a", "x", 1, 2, training_length=256))}, "the window first"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_one_line(records, changes, message):
    with refused(message):
        points_of(records, names=["a"], **changes)


def test_records_of_some_seeds_of_a_model_are_refused(records):
    three = length_json(*(checkpoint(name, "small", 0.1, 1000) for name in "abc"))
    with pytest.raises(
        UserError, match="small was measured by position with 3 seeds, and these are records of 2"
    ):
        points_of(records, three, names=["a", "b"])


def test_use_beyond_the_window_is_the_gain_of_the_same_checkpoints(records):
    beyond = [changed(records[name], n_short=128, n_long=512) for name in "cba"]
    points = points_of(records, beyond=beyond)
    gains = {name: summarize(records[name], 1000, 0)["all_targets"]["gap_short_minus_long"] for name in "abc"}
    assert [[one["use_nats"] for one in point["seeds"]] for point in points[:2]] == [
        [gains["a"], gains["b"]],
        [gains["c"]],
    ]
    assert points[0]["use_nats"]["value"] == pytest.approx((gains["a"]["value"] + gains["b"]["value"]) / 2)
    assert points[1]["use_nats"] == points[1]["gain_nats"] == gains["c"]
    assert summarize_all_targets(records["c"], 1000, 0) == summarize(records["c"], 1000, 0)["all_targets"]
    change = summarize(records["c"], 1000, 0)["all_targets"]["absolute_gap"]
    assert points[1]["change_nats"] == points[1]["seeds"][0]["change_nats"] == change
    assert "use_nats" not in points[2] and "use_nats" not in points_of(records, names=["a"])[0]
    with pytest.raises(UserError, match="small: --beyond has records of other seeds; give those of the same"):
        points_of(records, names=["a", "b"], beyond=beyond[2:])
    with pytest.raises(UserError, match="runs/a was measured beyond 64 tokens, and its window has 128"):
        points_of(records, names=["a"], beyond=[changed(records["a"], n_short=64)])


def test_models_may_differ_in_tau_where_only_the_use_is_read(records):
    beyond = [changed(records["a"], tau_nats=0.1), records["c"]]
    with pytest.raises(UserError, match="the records have different N, M, tau and targets per block"):
        by_model(beyond, MEASURED)
    assert [key[0] for key in by_model(beyond, MEASURED, of_all_targets=True)] == ["small", "large"]
    with pytest.raises(UserError, match="the records have different N, M and targets per block"):
        by_model([changed(records["a"], n_long=512), records["c"]], MEASURED, of_all_targets=True)


def test_the_entropy_of_attention_is_that_at_the_window_where_it_was_measured(records):
    one = checkpoint("a", "small", 0.4, 1000)
    for number, each in enumerate(one["at_lengths"]):
        each["attention"] = {"entropy_nats": interval(3.0 + number), "zero_share": interval(0.0)}
    (point,) = points_of(records, length_json(one), names=["a"])
    assert point["entropy_nats"] == point["seeds"][0]["entropy_nats"] == interval(3.0)
    assert "entropy_nats" not in points_of(records, names=["a"])[0]


def needle_json(labels, exact, window=128):
    """Needles of 1 and 2 tokens at two and four windows; ``exact`` of a label is that of 1 token at four."""
    return {"models": [
        {
            "label": label,
            "checkpoints": [{"training_length": window}],
            "over_depths": [
                {"value_tokens": tokens, "length": times * 128, "exact": interval(exact[label] - 0.1 * (tokens - 1))}
                for tokens in (2, 1) for times in (2, 4)
            ],
        }
        for label in labels
    ]}  # fmt: skip


def test_needles_join_the_points_of_their_label(records):
    points = points_of(records)
    found = with_needles(points, needle_json(["small", "other"], {"small": 0.7, "other": 0.2}), times=4)
    assert found[0]["needle_exact"] == interval(0.7)
    assert [one["needle_exact"] for one in found[0]["seeds"]] == 2 * [interval(0.7)]
    assert found[1:] == points[1:], "large has no needles; cross-fitted records are no model of their own"


@pytest.mark.parametrize(
    ("needles", "times", "message"),
    [
        (needle_json(["tall"], {"tall": 0.5}), 4, "both needles and records: tall; small, large, small"),
        (
            needle_json(["small"], {"small": 0.5}),
            8,
            "not measured at 8 times its window; give --lengths 1024",
        ),
        (needle_json(["small"], {"small": 0.5}, window=None), 4, "give models trained by this project"),
        (
            {"models": [{"label": "small", "checkpoints": []}]},
            4,
            "of small were measured before means over depths",
        ),
    ],
)
def test_needles_of_other_models_or_lengths_are_refused(records, needles, times, message):
    with pytest.raises(UserError, match=message):
        with_needles(points_of(records), needles, times)


def test_correlations_with_needles_are_over_the_models_that_have_them():
    points = made_up_points(7, 2, np.random.default_rng(3))
    exact = {f"model {number}": (number * 3 % 5) / 5 for number in range(5)}
    joined = with_needles(points, needle_json(exact, exact), times=4)
    found = correlations(joined, resamples=1000, seed=0)
    rises = values_of(points).mean(axis=1)[:5, 1]
    assert found["needle_exact"]["models"] == 5 and found["net_recovery"]["models"] == 7
    assert found["needle_exact"]["value"] == pytest.approx(spearmanr(list(exact.values()), rises).statistic)
    few = with_needles(points, needle_json(["model 1"], exact), times=4)
    assert "needle_exact" not in correlations(few, resamples=1000, seed=0)


def made_up_points(models, seeds, rng):
    """Points whose seeds are far apart and whose models rise the less the more they recover, but for the last one."""
    points = []
    for model in range(models):
        rise = -model if model < models - 1 else 5.0
        noise = rng.normal(0, 0.8, (seeds, 2))
        own = [{"net_recovery": {"value": model + x}, "k_suffices": {"value": 0.5}, "rise_nats": {"value": rise + y}}
               for x, y in noise]  # fmt: skip
        points.append({**own[0], "label": f"model {model}", "crossfit": False, "seeds": own})
    return points


def values_of(points):
    return np.array(
        [[(one["net_recovery"]["value"], one["rise_nats"]["value"]) for one in p["seeds"]] for p in points]
    )


def test_correlations_are_those_of_the_means_of_seeds_and_told_without_each_model():
    points = made_up_points(7, 3, np.random.default_rng(5))
    found = correlations([*points, {**points[0], "crossfit": True, "seeds": [{"net_recovery": {"value": 99.0}}]}],
                         resamples=1000, seed=0)  # fmt: skip
    means = values_of(points).mean(axis=1)
    own = found["net_recovery"]
    assert own["value"] == pytest.approx(spearmanr(*means.T).statistic) and own["models"] == 7
    without = [spearmanr(*np.delete(means, model, axis=0).T).statistic for model in range(7)]
    assert list(own["without"].values()) == pytest.approx(without)
    assert own["without"]["model 6"] < -0.9 < own["value"], "one model speaks against it"
    assert found["k_suffices"]["value"] is None and found["k_suffices"]["low"] is None, "it is constant"
    assert found["k_suffices"]["undefined"] == 1
    assert correlations(points[:3], resamples=1000, seed=0) == {}, "three models"


def test_a_correlation_that_is_undefined_in_many_resamples_has_no_interval():
    """All models but one have the same use: a resample without that one has no correlation."""
    points = made_up_points(7, 2, np.random.default_rng(5))
    for number, point in enumerate(points):
        point["seeds"] = [{**one, "k_suffices": {"value": float(number == 3)}} for one in point["seeds"]]
    found = correlations(points, resamples=2000, seed=0)
    own = found["k_suffices"]
    assert own["undefined"] == pytest.approx((6 / 7) ** 7, abs=0.04) and own["value"] is not None
    assert own["low"] is None and own["high"] is None and found["net_recovery"]["low"] is not None
    settings = {"settings": {"k": 4}, "correlations": {"k_suffices": own}}
    console = Console(file=io.StringIO(), width=200)
    console.print(render_correlations(settings))
    assert f"undefined in {100 * own['undefined']:.0f} % of the resamples" in console.file.getvalue()


def test_the_interval_of_a_correlation_goes_over_models_and_seeds():
    """Against a bootstrap that was written another way; and seeds that agree make it narrower."""
    points = made_up_points(9, 2, np.random.default_rng(7))
    own = correlations(points, resamples=4000, seed=0)["net_recovery"]
    values = values_of(points)
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(4000):
        turns = rng.choice(9, 9)
        of_seeds = rng.multinomial(2, [0.5, 0.5], size=9) / 2
        drawn.append(np.einsum("ms,msv->vm", of_seeds, values[turns]))
    x, y = (rankdata(each, axis=1) for each in np.stack(drawn, axis=1))
    x, y = (each - each.mean(axis=1, keepdims=True) for each in (x, y))
    drawn = (x * y).sum(axis=1) / np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    assert (own["low"], own["high"]) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.05)
    for number, point in enumerate(points):
        for one in point["seeds"]:
            one["net_recovery"], one["rise_nats"] = {"value": number}, {"value": -number}
    exact = correlations(points, resamples=1000, seed=0)["net_recovery"]
    assert (exact["value"], exact["low"], exact["high"]) == pytest.approx((-1, -1, -1))


def test_many_models_have_letters_and_use_has_a_panel(records):
    (point,) = points_of(records, names=["a"])
    points = []
    for number in range(10):
        own = {"rise_nats": interval(0.1 * number), "use_nats": interval(0.01 * number)}
        seeds = [{**point["seeds"][0], **own}]
        points.append({**point, **own, "label": f"encoding {number}", "seeds": seeds})
    settings = SETTINGS | {"n_beyond": 512, "window": 128}
    found = {"settings": settings, "points": points,
             "correlations": correlations(points, resamples=1000, seed=0)}  # fmt: skip
    sparsity, use = joint_figure(found).axes
    assert "rank correlation of 10 models:\n1.00 [1.00, 1.00]" in use.get_xlabel()
    assert "correlation" not in sparsity.get_xlabel(), "all have the same net recovery"
    assert [each.get_text() for each in use.texts] == list("ABCDEFGHIJ")
    assert [each.xy for each in use.texts][3] == pytest.approx((0.03, 0.3))
    assert [tick.get_text() for tick in use.get_xticklabels()] == ["-0.1", "-0.05", "0", "0.05", "0.1", "0.2"]
    assert use.containers[3][0].get_xdata()[0] == pytest.approx(0.03)
    (equal,) = [line for line in use.lines if line.get_linestyle() == ":"]
    ends = use.transData.inverted().transform(equal.get_transform().transform(np.c_[equal.get_data()]))
    assert ends[0, 0] < -0.1 < 0.1 < ends[1, 0] and ends.sum(axis=1) == pytest.approx(0, abs=1e-9)


def test_letters_of_points_that_are_close_do_not_cover_each_other(records):
    (point,) = points_of(records, names=["a"])
    points = [
        {**point, "label": f"encoding {number}", "rise_nats": interval(0.4 + 0.001 * number)}
        for number in range(6)
    ]
    points += [{**point, "label": f"far {number}", "rise_nats": interval(number)} for number in (1, 2, 3)]
    (axes,) = joint_figure({"settings": SETTINGS, "points": points}).axes
    boxes = [each.get_window_extent() for each in axes.texts]
    assert len(boxes) == 9 and not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_an_interval_that_does_not_hold_its_value_can_be_drawn(records):
    """A percentile interval need not; matplotlib refuses bars of negative length."""
    beside = {"value": 0.3, "low": 0.31, "high": 0.4}
    found = {"settings": SETTINGS, "points": [{**point, "rise_nats": beside} for point in points_of(records)]}
    for axes in (ladder_figure(found).axes[3], joint_figure(found).axes[0]):
        (bars,) = axes.containers[0].lines[2][-1:]
        assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([0.3, 0.4])


def test_needles_have_a_panel_a_column_and_a_correlation(records):
    points = with_needles(points_of(records), needle_json(["small"], {"small": 0.7}), times=4)
    found = {"settings": SETTINGS, "points": points}
    (bar,) = joint_figure(found).axes[1].containers
    assert (
        bar[0].get_xdata()[0] == pytest.approx(70)
        and bar[0].get_ydata()[0] == points[0]["rise_nats"]["value"]
    )
    table = render_ladder(found)
    assert [str(cell) for cell in table.columns[-1].cells] == ["70 [60, 90]", "", ""]
    assert str(table.columns[-1].header) == "needles [%]"


def test_the_script_joins_draws_and_prints(folders, records, tmp_path, run_here):
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    command = [*folders.values(), "--length", tmp_path, "--out", tmp_path / "out", "--resamples", 1000]
    printed = run_here(SCRIPT, *command).stdout
    assert "small, cross-fit" in printed and "4,000" in printed
    found = json.loads((tmp_path / "out" / "ladder.json").read_text())
    joined = [[folders["a"], folders["b"]], [folders["c"]], [folders["ab"]]]
    expected = zip(points_of(records), joined, strict=True)
    assert found["points"] == [{**one, "records": list(map(str, of))} for one, of in expected]
    assert (tmp_path / "out" / "ladder.png").stat().st_size > 10_000
    panels = ladder_figure(found).axes
    assert [axes.get_title("left")[:3] for axes in panels] == ["(a)", "(b)", "(c)", "(d)"]
    shares = [100 * point["share_over_tau"]["value"] for point in found["points"][:2]]
    assert [container[0].get_ydata()[0] for container in panels[0].containers] == pytest.approx(shares)
    (line,) = [line for line in panels[3].lines if len(line.get_xdata()) == 2]
    assert list(line.get_xdata()) == [1000, 4000]
    assert list(line.get_ydata()) == [0.45, 0.2]
    (axes,) = joint_figure(found).axes
    joint = {(container[0].get_xdata()[0], container[0].get_ydata()[0]) for container in axes.containers}
    assert joint == {(100 * p["net_recovery"]["value"], p["rise_nats"]["value"]) for p in found["points"]}


def test_records_of_scaled_rope_are_joined_with_the_loss_of_the_same_scaling(records):
    def scaled(name):
        return changed(records["a"], options={"rope_scaling": {"name": name}})

    plain, yarn = points_of({"a": records["a"], "yarn": scaled("yarn")}, names=["a", "yarn"])
    assert plain["label"] == "small" and plain["rise_nats"]["value"] == 0.4
    assert yarn["label"] == "small, YaRN" and yarn["rise_nats"]["value"] == 0.1
    with pytest.raises(UserError, match="was not measured by position; .* scaled as in the records"):
        points_of({"a": scaled("ntk")}, names=["a"])
    points = [plain, yarn, *points_of(records, names=["c"])]
    rises = ladder_figure({"settings": SETTINGS, "points": points}).axes[3].containers
    assert sorted(float(container[0].get_ydata()[0]) for container in rises) == [0.1, 0.2, 0.4]


def test_models_of_one_size_have_the_joint_figure_only(folders, tmp_path, run_here):
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    run_here(
        SCRIPT,
        folders["a"],
        folders["ab"],
        "--length",
        tmp_path,
        "--out",
        tmp_path / "out",
        "--resamples",
        1000,
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "joint.pdf",
        "joint.png",
        "ladder.json",
    ]


def test_records_of_different_contexts_or_of_some_models_beyond_the_window_are_refused(
    folders, tmp_path, run_here
):
    rng = np.random.default_rng(0)
    manifest = made_up_manifest(200, checkpoint_sha256=SHAS["b"], n_long=64)
    write_records(tmp_path / "other", manifest, made_up_targets(200, 30, rng), rng)
    (tmp_path / "length.json").write_text(json.dumps(MEASURED))
    rest = ("--length", tmp_path, "--out", tmp_path / "out", "--resamples", 1000)
    both = (folders["a"], tmp_path / "other")
    assert "the records have different N, M" in run_here(SCRIPT, *both, *rest).stderr
    both = (folders["a"], folders["c"])
    refused = run_here(SCRIPT, *both, *rest, "--beyond", folders["c"]).stderr
    assert "small: not measured beyond the window; give their records to --beyond" in refused
    assert not (tmp_path / "out").exists()


def test_no_interval_where_most_resamples_have_no_correlation():
    points = []
    for number, (net, rise) in enumerate(((1, 0), (0, 1), (0, 0), (0, 0))):
        own = {"net_recovery": {"value": net}, "rise_nats": {"value": rise}}
        points.append({**own, "label": f"model {number}", "crossfit": False, "seeds": [own]})
    found = correlations(points, resamples=1000, seed=0)["net_recovery"]
    assert found["value"] == pytest.approx(-1 / 3) and found["low"] is None and found["high"] is None


def test_the_heading_is_that_of_the_model_of_most_seeds(records):
    points = points_of(records)
    for found in (points, points[::-1]):
        for figure in (ladder_figure, joint_figure):
            heading = " ".join(figure({"settings": SETTINGS, "points": found}).get_suptitle().split())
            assert "bars: 95 %, by training and document" in heading
