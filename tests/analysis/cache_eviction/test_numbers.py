"""Numbers of a comparison of eviction policies, from made-up losses, against plain arithmetic."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from analysis.cache_eviction import numbers
from analysis.cache_eviction.figure import BEST, policy_looks
from analysis.cache_eviction.result import EvictionResult
from analysis.stats.bootstrap import ClusterBootstrap, holm
from olmo_sparsity.util.rng import Stream
from tests.analysis.cache_eviction.made_up import BLOCKS, BUDGETS, WAYS, B, made_up
from tests.support.refusals import refused


def values_of(record, policy, near, budget, column="loss_nats", far_context="true"):
    """Of all targets, (n,)."""
    rows = record.losses.query(
        "policy == @policy and near == @near and budget == @budget and far_context == @far_context"
    )
    return rows.set_index("target_id")[column].loc[record.targets["target_id"]].to_numpy(np.float64)


def over_full(record, policy, near, budget, far_context="true"):
    full = values_of(record, "full", near, 1.0, far_context=far_context)
    return values_of(record, policy, near, budget, far_context=far_context) - full


def assert_interval(row, values, record):
    """That a row has the mean of values of all targets, and the interval and p that this has."""
    bootstrap = ClusterBootstrap.of(record.targets)
    draws = bootstrap.ratio(values, np.ones(len(values)))
    interval = bootstrap.interval(draws)
    assert interval.value == pytest.approx(values.mean())
    expected = (interval.value, interval.low, interval.high)
    assert (row["value"], row["low"], row["high"]) == pytest.approx(expected, abs=1e-9)
    if "p" in row:
        assert row["p"] == pytest.approx(bootstrap.p_value(draws))


def test_the_summary_has_the_mean_over_all_targets_and_its_interval():
    record = made_up()
    frame = record.summary().set_index(["policy", "near", "budget", "name"]).sort_index()
    gains = values_of(record, "none", "reread", 0.0) - values_of(record, "full", "kept", 1.0)
    tenth = np.argsort(-gains)[: len(gains) // 10]
    choices = record.choices.astype({"spearman": float, "overlap": float})
    agreement = choices.groupby(["policy", "near", "budget"])[["spearman", "overlap"]].mean()
    for (policy, _, near), budget in product(WAYS, BUDGETS):
        over = over_full(record, policy, near, budget)
        row = frame.loc[(policy, near, budget, "loss_over_full_nats")]
        assert_interval(row, over, record)
        assert (row["keys"], row["keys_beyond_sinks"]) == (8 * budget, 8 * budget - 1)
        assert frame.loc[(policy, near, budget)]["value"].to_dict() == pytest.approx(
            {
                "loss_over_full_nats": over.mean(),
                "kl_nats": values_of(record, policy, near, budget, "kl_nats").mean(),
                "share_of_gain": 1 - over.sum() / gains.sum(),
                "loss_over_full_top_tenth_nats": over[tenth].mean(),
                **agreement.loc[(policy, near, budget)],
            }
        )


def test_without_a_gain_there_is_no_share_of_it():
    frame = made_up(gain=0.0).summary()
    assert "share_of_gain" not in set(frame["name"])
    assert "so that no share of it is given" in str(made_up(gain=0.0))
    assert "share_of_gain" in set(made_up().summary()["name"])


def test_the_gain_is_that_of_all_targets():
    record = made_up()
    values = record.gain().set_index("name")["value"]
    full = record.targets["loss_full_nats"].mean()
    short = record.targets["loss_short_nats"].mean()
    assert values.tolist() == pytest.approx([full, short, short - full], rel=1e-5)


def test_differences_are_paired_and_adjusted_as_by_holm():
    record = made_up()
    frame = record.differences()
    assert set(frame["policy"]) == {"h2o", "random", "leave-one-out-kl"}
    for row in frame.to_dict("records"):
        one, snapkv = (over_full(record, name, "kept", row["budget"]) for name in (row["policy"], "snapkv"))
        assert_interval(row, one - snapkv, record)
    is_reference = frame["policy"] == "leave-one-out-kl"
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"].mask(is_reference)), nan_ok=True)
    assert set(record.differences("snapkv", "reread")["policy"]) == {"knorm"}


def test_differences_of_some_policies_are_adjusted_for_these_alone():
    record = made_up()
    frame = record.differences("snapkv", "kept", ["random"])
    pd.testing.assert_frame_equal(
        frame.drop(columns="p_holm"),
        record.differences().query("policy == 'random'").drop(columns="p_holm").reset_index(drop=True),
    )
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"]))


def plain_best(record, near, budget, seed, halved):
    """What is best by KL on either half, and the loss over full of each on the other half."""
    units = record.targets[halved]
    order = np.random.default_rng([Stream.HALVES, seed]).permutation(units.unique())
    is_first = units.isin(order[: len(order) // 2]).to_numpy()
    policies = [policy for policy, _, of_policy in WAYS if of_policy == near]
    kl = {policy: values_of(record, policy, near, budget, "kl_nats") for policy in policies}
    chosen = [min(kl, key=lambda policy: kl[policy][half].mean()) for half in (is_first, ~is_first)]
    over = [over_full(record, policy, near, budget) for policy in chosen]
    return chosen, (over[0][~is_first].mean() + over[1][is_first].mean()) / 2


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("halved", ["group", "block"])
def test_the_best_is_chosen_on_one_half_and_measured_on_the_other(seed, halved):
    record = made_up()
    if halved == "block":
        record = replace(record, targets=record.targets.drop(columns="group"))
    frame = record.best_found(seed=seed)
    rows = frame[frame["name"] == "loss_over_full_nats"]
    assert len(rows) == 2 * len(BUDGETS)
    for row in rows.itertuples():
        expected = plain_best(record, row.near, row.budget, seed, halved)
        assert ([row.first, row.second], pytest.approx(row.value)) == expected


def test_one_block_has_no_best():
    record = made_up()
    first = {
        "targets": record.targets[record.targets["block"] == 0],
        "losses": record.losses[record.losses["target_id"] < B],
        "choices": record.choices[record.choices["block"] == 0],
    }
    with refused("there is one block; measure more"):
        EvictionResult(record.settings, **first).best_found()


def test_losses_by_distance_from_the_choice():
    assert numbers.distance_edges(512) == [1, 5, 9, 17, 33, 65, 129, 257, 513]
    assert numbers.distance_edges(32) == [1, 5, 9, 17, 33]
    assert numbers.distance_edges(3) == [1, 4]
    record = made_up()
    frame = record.by_distance()
    place = record.targets["place"].to_numpy()
    for row in frame.itertuples():
        inside = (row.from_tokens <= place + 1) & (place + 1 < row.to_tokens)
        over = over_full(record, row.policy, row.near, row.budget)
        assert row.value == pytest.approx(over[inside].mean())
    assert {(row.from_tokens, row.to_tokens) for row in frame.itertuples()} == {(1, 5), (5, 9)}


def test_differences_are_of_the_budgets_at_which_the_named_one_was_judged():
    record = made_up()
    few = replace(record, losses=record.losses.query("not (policy == 'h2o' and budget == 0.5)"))
    frame = few.differences("h2o")
    assert set(frame["budget"]) == {0.25} and set(frame["policy"]) >= {"snapkv", "random"}


BOTH_WAYS = [
    *WAYS,
    ("snapkv:blind=1", "far", "reread"),
    ("h2o", "far and near", "reread"),
    ("h2o:blind=1:mean=1", "far", "reread"),
    ("tova:window=3", "far and near", "reread"),
    ("tova:window=3:blind=1", "far", "reread"),
]


@pytest.mark.parametrize("near", ["reread", "kept"])
def test_what_a_policy_gains_by_seeing_the_near_tokens_is_paired_and_adjusted_over_policies_and_budgets(near):
    """Another parameter makes another policy: h2o has none blind beside it."""
    record = made_up(ways=BOTH_WAYS)
    frame = record.aware_less_blind(near)
    pairs = {("snapkv", "snapkv:blind=1"), ("tova:window=3", "tova:window=3:blind=1")}
    if near == "kept":
        pairs = {("snapkv", "snapkv:blind=1")}
    assert set(zip(frame["policy"], frame["blind"], strict=True)) == pairs
    assert set(frame["near"]) == {near} and set(frame["sees"]) == {"far and near"}
    for row in frame.to_dict("records"):
        aware = over_full(record, row["policy"], near, row["budget"])
        assert_interval(row, aware - over_full(record, row["blind"], "reread", row["budget"]), record)
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"]))
    assert f"aware, near {near}, less blind" in set(record.every_number()["frame"])


def test_policies_that_keep_the_same_keys_differ_in_no_test_and_agree_once():
    record = made_up(ways=[(name, "nothing", "reread") for name in "abcde"])
    losses = record.losses.set_index("policy")
    values = ["loss_nats", "kl_nats"]
    losses.loc["b", values] = losses.loc["a", values].to_numpy()
    record = replace(record, losses=losses.reset_index())
    frame = record.differences("a", "reread")
    of_same = frame["policy"] == "b"
    assert (frame["value"][of_same] == 0).all() and frame["p_holm"][of_same].isna().all()
    assert frame["p_holm"][~of_same].tolist() == pytest.approx(holm(frame["p"][~of_same]))
    assert set(record.agreement_tells()["n_policies"]) == {4}


def test_caches_that_nobody_chose_say_what_there_is_to_lose():
    record = made_up()
    frame = record.caches().set_index(["policy", "near"])
    assert set(frame.index) == {(name, near) for name in ("sinks", "none") for near in ("kept", "reread")}
    for near in ("kept", "reread"):
        for name, share in (("sinks", 0.125), ("none", 0.0)):
            over = over_full(record, name, near, share)
            assert frame.loc[(name, near), "value"] == pytest.approx(over.mean())


def test_without_a_policy_in_both_ways_nothing_is_compared():
    assert made_up().aware_less_blind().empty
    assert not [name for name in made_up().every_number()["frame"] if "less blind" in name]
    with refused("near tokens were not treated as 'again'; choose from kept, reread"):
        made_up().aware_less_blind("again")


def test_losses_by_gain_and_by_kind():
    record = made_up(gain=2.0)
    gains = values_of(record, "none", "reread", 0.0) - values_of(record, "full", "reread", 1.0)
    by_gain = record.by_gain()
    assert set(by_gain["n_targets"].groupby(by_gain["above_nats"]).nunique()) == {1}
    for row in by_gain.itertuples():
        inside = (gains > row.above_nats) & (gains <= row.up_to_nats)
        over = over_full(record, row.policy, row.near, row.budget)
        assert (row.n_targets, row.value) == (inside.sum(), pytest.approx(over[inside].mean()))
    of_one = by_gain[by_gain["policy"] == "knorm"].groupby("budget")["n_targets"].sum()
    assert of_one.tolist() == [len(gains)] * 2
    by_kind = record.by_kind()
    assert list(by_kind["kind"].unique()) == ["repeat", "name", "number"]
    for row in by_kind.itertuples():
        inside = (record.targets["kind"] == row.kind).to_numpy()
        over = over_full(record, row.policy, row.near, row.budget)
        assert (row.n_targets, row.value) == (inside.sum(), pytest.approx(over[inside].mean()))


def test_agreement_that_orders_policies_as_their_losses_do_correlates_by_minus_one():
    names = [("a", "far and near"), ("b", "far and near"), ("c", "nothing"), ("d", "far")]
    ways = [(name, sees, "reread") for name, sees in names]
    record = made_up(ways=[*ways, ("leave-one-out-kl", "targets", "reread")])
    assert set(made_up().agreement_tells()["near"]) == set()  # three policies at most
    frame = record.agreement_tells()
    assert frame["n_policies"].tolist() == [4] * 2 * len(BUDGETS)
    assert (frame["low"] >= -1).all() and (frame["high"] <= 1).all()
    choices = record.choices.astype({"spearman": float, "overlap": float})
    for row in frame.itertuples():
        losses = [over_full(record, name, "reread", row.budget).mean() for name in "abcd"]
        means = choices[choices["budget"] == row.budget].groupby("policy")[row.name].mean()
        assert row.value == pytest.approx(spearmanr(means[list("abcd")], losses).statistic)
    order = {name: -over_full(record, name, "reread", 0.5).mean() for name in "abcd"}
    overlap = record.choices["policy"].map(order).fillna(0.0).astype(np.float32)
    tells = replace(record, choices=record.choices.assign(overlap=overlap)).agreement_tells()
    assert tells.query("budget == 0.5 and name == 'overlap'")["value"].tolist() == pytest.approx([-1])


def test_how_many_heads_keep_given_tokens():
    record = made_up()
    with refused("no kept sets were saved; measure with kept_sets=True"):
        record.keeps(pd.DataFrame({"block": [0], "name": ["key"], "column": [1]}))
    shares = list(np.random.default_rng(3).random((len(record.choices), 8)).astype(np.float32))
    record = replace(record, choices=record.choices.assign(kept_share=shares))
    shifts = [("key", 0), ("key", 3), ("value", 5)]
    tokens = [(block, name, (block + shift) % 8) for block in range(10) for name, shift in shifts]
    tokens = pd.DataFrame(tokens, columns=["block", "name", "column"])
    frame = record.keeps(tokens)
    assert len(frame) == len(WAYS) * len(BUDGETS) * 3
    kept = record.choices.merge(tokens, on="block")
    pairs = zip(kept["kept_share"], kept["column"], strict=True)
    kept["share"] = [float(shares[column]) for shares, column in pairs]
    means = kept.groupby(["policy", "near", "budget", "name"])["share"].mean()
    for row in frame.itertuples():
        key, value = means[row.policy, row.near, row.budget][["key", "value"]]
        expected = {"key": key, "value": value, "key less value": key - value}
        assert row.value == pytest.approx(expected[row.name])
        assert row.name != "key less value" or row.low < row.value


def test_comparisons_on_other_texts_are_pooled():
    first, second = made_up(), made_up(seed=1)
    pooled = EvictionResult.pool({"books": first, "code": second})
    assert pooled.counts == {"targets": 2 * B * BLOCKS, "blocks": 2 * BLOCKS, "documents": 24, "groups": 12}
    assert pooled.targets["target_id"].tolist() == list(range(2 * B * BLOCKS))
    assert (pooled.targets["target_id"] // B == pooled.targets["block"]).all()
    over = [over_full(one, "h2o", "kept", 0.5) for one in (first, second)]
    np.testing.assert_array_equal(over_full(pooled, "h2o", "kept", 0.5), np.concatenate(over))
    overlaps = [one.choices.query("policy == 'random'")["overlap"].mean() for one in (pooled, first, second)]
    assert overlaps[0] == pytest.approx(np.mean(overlaps[1:]), rel=1e-6)
    assert pooled.settings.blocks_requested == 2 * BLOCKS and pooled.settings.texts.name == "books, code"
    without = replace(second, targets=second.targets.drop(columns="group"))
    with refused("some of the comparisons have groups and some none"):
        EvictionResult.pool({"books": first, "code": without})
    for name, value in (("sinks", 0), ("model_sha256", "other")):
        other = replace(second, settings=second.settings.but(**{name: value}))
        with refused(f"comparisons that are pooled need the same settings: {name}"):
            EvictionResult.pool({"books": first, "code": other})


def test_what_is_of_other_settings_or_there_twice_is_not_put_together():
    first = made_up()
    with refused("parts that are joined need the same settings: sinks 1 -> 0"):
        EvictionResult.of_parts([first, replace(first, settings=first.settings.but(sinks=0))])
    with refused("block 0 is in two of the parts; give each block once"):
        EvictionResult.of_parts([first, made_up()])


def test_pooled_comparisons_say_what_made_them():
    versions = {"versions": {"torch": "2"}, "machine": {"cpus": 2}, "command": "of the first"}
    records = {}
    for name, commit in (("books", "a"), ("code", "b"), ("releases", "a")):
        record = made_up()
        records[name] = replace(record, provenance={**versions, "commit": commit, "seconds": 1.5})
    assert EvictionResult.pool(records).provenance == {
        "versions": {"torch": "2"},
        "machine": {"cpus": 2},
        "seconds": 4.5,
        "commit": "a b",
    }
    assert EvictionResult.pool({"a": made_up(), "b": made_up()}).provenance == {"seconds": 2.0, "commit": ""}


def test_texts_of_placebos_are_numbered_on_where_comparisons_are_pooled():
    first, second = (made_up(seed, far_contexts=("true", "placebo")) for seed in (0, 1))
    first, second = (
        replace(one, targets=one.targets.assign(placebo_text=(one.targets["text"] + 7) % 20))
        for one in (first, second)
    )
    pooled = EvictionResult.pool({"books": first, "code": second}).targets
    of_first = set(pooled["text"][: B * BLOCKS]) | set(pooled["placebo_text"][: B * BLOCKS])
    rows = pooled.iloc[B * BLOCKS :]
    assert not of_first & (set(rows["text"]) | set(rows["placebo_text"]))
    difference = rows["placebo_text"] - rows["text"]
    expected = second.targets["placebo_text"] - second.targets["text"]
    assert difference.tolist() == expected.tolist()


def test_the_figure_names_model_and_texts_without_their_folders():
    record = made_up()
    record = replace(
        record, settings=record.settings.but(model="/home/me/model.gguf", texts="/home/me/code.jsonl")
    )
    [title] = [text.get_text() for text in record.figure().texts if "N 12" in text.get_text()]
    assert "model.gguf on code.jsonl: N 12" in title and "/" not in title
    assert "/home/me/model.gguf" in str(record)


def test_what_was_not_judged_is_refused():
    record = made_up()
    with refused("near tokens were not treated as 'keep'; choose from kept, reread"):
        record.differences("snapkv", near="keep")
    for policies in (("knorm",), ("snapkv", "kept", ["knorm"])):
        with refused("'knorm' was not judged with near tokens 'kept'; choose from snapkv, h2o, random"):
            record.differences(*policies)
    with refused("nothing was judged at a budget of 0.3; choose from 0.25, 0.5"):
        record.table(0.3)


def test_the_placebo_has_its_own_rows_and_no_gain_to_share():
    record = made_up(far_contexts=("true", "placebo"))
    rows = record.summary().query("far_context == 'placebo'")
    assert set(rows["name"]) == {"loss_over_full_nats", "kl_nats", "spearman", "overlap"}
    row = rows.query("policy == 'h2o' and budget == 0.5 and name == 'loss_over_full_nats'")
    over = over_full(record, "h2o", "kept", 0.5, "placebo")
    assert row["value"].tolist() == pytest.approx([over.mean()])


def test_a_result_is_read_as_it_was_written(tmp_path):
    record = made_up()
    record.save(tmp_path)
    again = EvictionResult.load(tmp_path)
    assert again.settings == record.settings and again.provenance == record.provenance
    for name in ("targets", "losses", "choices"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(record, name))
    with refused("is missing; measure again"):
        EvictionResult.load(tmp_path / "elsewhere")


def test_what_is_printed_is_sorted_and_all_numbers_are_in_one_file(tmp_path):
    record = made_up()
    lines = str(record).splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("policy"))
    values = [float(line.split("[")[0].split()[-1]) for line in lines[head + 1 : head + 1 + len(WAYS)]]
    assert values == sorted(values) and len(values) == len(WAYS)
    [csv, png] = record.write(tmp_path)
    frame = pd.read_csv(csv)
    assert set(frame["frame"]) == {
        *("gain", "caches", "summary", "best_found", "by_distance", "by_gain", "by_kind"),
        *("differences to snapkv, near kept", "differences to snapkv, near reread"),
    }
    assert png.stat().st_size > 0


def test_the_figure_has_a_line_a_policy_and_the_best():
    record = made_up()
    kept, reread = record.figure().axes
    labels = [{line.get_label() for line in axes.get_lines()} for axes in (kept, reread)]
    assert {"snapkv", "h2o", "random", "leave-one-out-kl", BEST} <= labels[0]
    assert {"knorm", BEST} <= labels[1] and "snapkv" not in labels[1]
    [line] = [line for line in reread.get_lines() if line.get_label() == BEST]
    blind = ["knorm", "random", "leave-one-out-kl"]
    best = record.best_found(policies=blind).query("near == 'reread' and name == 'loss_over_full_nats'")
    assert set(best["first"]) | set(best["second"]) <= set(blind)
    np.testing.assert_allclose(np.array(line.get_ydata(), dtype=float), best["value"])
    [line] = [line for line in kept.get_lines() if line.get_label() == "h2o"]
    expected = [over_full(record, "h2o", "kept", budget).mean() for budget in BUDGETS]
    np.testing.assert_allclose(np.array(line.get_ydata(), dtype=float), expected)


def test_a_blind_policy_beside_its_aware_form_has_a_line_of_its_own():
    """Where near tokens are read again for both; a blind one alone is named as the aware one of the other panel."""
    both = [
        ("snapkv", "far and near", "reread"),
        ("snapkv:blind=1", "far", "reread"),
        ("tova:blind=1", "far", "reread"),
    ]
    record = made_up(ways=both)
    [axes] = record.figure().axes
    assert axes.get_title(loc="left") == "Near tokens are read again"
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert {"snapkv", "snapkv:blind=1", "tova"} <= set(lines) and "tova:blind=1" not in lines
    for name in ("snapkv", "snapkv:blind=1"):
        expected = [over_full(record, name, "reread", budget).mean() for budget in BUDGETS]
        np.testing.assert_allclose(np.array(lines[name].get_ydata(), dtype=float), expected)
    faces = [lines[name].get_markerfacecolor() for name in ("snapkv", "snapkv:blind=1")]
    assert len(set(faces)) == 2 and lines["snapkv"].get_color() == lines["snapkv:blind=1"].get_color()
    [axes] = made_up(ways=both[1:]).figure().axes
    assert axes.get_title(loc="left") == "Blind to the near tokens, which are read again"
    assert {"snapkv", "tova"} <= {line.get_label() for line in axes.get_lines()}


def test_forms_of_a_policy_have_its_color_and_no_two_the_same_look():
    labels = [
        "snapkv",
        "snapkv:window=8",
        "snapkv:window=8:blind=1",
        "leave-one-out-kl:first=16",
        "mine",
        "mine:a=1",
    ]
    looks = policy_looks(labels)
    assert list(looks) == labels and len({str(look) for look in looks.values()}) == len(labels)
    assert {looks[label]["color"] for label in labels[:3]} == {looks["snapkv"]["color"]}
    assert (
        looks["leave-one-out-kl:first=16"]["color"]
        == policy_looks(["leave-one-out-kl"])["leave-one-out-kl"]["color"]
    )
    assert not {looks["mine"]["color"], looks["mine:a=1"]["color"]} & {looks["snapkv"]["color"]}
