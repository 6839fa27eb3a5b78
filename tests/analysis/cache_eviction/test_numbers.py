"""Numbers of a comparison of eviction policies, from made-up losses, against plain arithmetic."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr, ttest_1samp

from analysis.cache_eviction import numbers
from analysis.cache_eviction.figure import BEST, eviction_figure
from analysis.cache_eviction.result import EvictionResult
from analysis.stats.bootstrap import ClusterBootstrap
from olmo_sparsity.util.rng import Stream
from tests.analysis.cache_eviction.made_up import BLOCKS, BUDGETS, WAYS, B, made_up
from tests.support.refusals import refused


def values_of(record, policy, near, budget, column="loss_nats", far_context="true"):
    losses = record.losses
    rows = losses[
        (losses["policy"] == policy)
        & (losses["near"] == near)
        & (losses["budget"] == budget)
        & (losses["far_context"] == far_context)
    ]
    return rows.set_index("target_id")[column].loc[record.targets["target_id"]].to_numpy(np.float64)


def over_full(record, policy, near, budget):
    return values_of(record, policy, near, budget) - values_of(record, "full", near, 1.0)


def test_the_summary_has_the_mean_over_all_targets_and_its_interval():
    record = made_up()
    frame = record.summary().set_index(["policy", "near", "budget", "name"]).sort_index()
    bootstrap = ClusterBootstrap.of(record.targets)
    gains = values_of(record, "none", "reread", 0.0) - values_of(record, "full", "kept", 1.0)
    tenth = np.argsort(-gains)[: len(gains) // 10]
    for policy, _, near in WAYS:
        for budget in BUDGETS:
            over = over_full(record, policy, near, budget)
            kl = values_of(record, policy, near, budget, "kl_nats")
            row = frame.loc[(policy, near, budget, "loss_over_full_nats")]
            interval = bootstrap.interval(bootstrap.ratio(over, np.ones(len(over))))
            assert (row["value"], row["low"], row["high"]) == pytest.approx(
                (over.mean(), interval.low, interval.high)
            )
            assert (row["keys"], row["keys_beyond_sinks"]) == (8 * budget, 8 * budget - 1)
            named = frame.loc[(policy, near, budget)]["value"]
            assert named["kl_nats"] == pytest.approx(kl.mean())
            assert named["share_of_gain"] == pytest.approx(1 - over.sum() / gains.sum())
            assert named["loss_over_full_top_tenth_nats"] == pytest.approx(over[tenth].mean())
            choices = record.choices
            rows = choices[(choices[["policy", "near", "budget"]] == [policy, near, budget]).all(axis=1)]
            assert named["spearman"] == pytest.approx(rows["spearman"].astype(float).iloc[1:].mean())
            assert named["overlap"] == pytest.approx(rows["overlap"].astype(float).mean())


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
    bootstrap = ClusterBootstrap.of(record.targets)
    for budget, rows in frame.groupby("budget"):
        for row in rows.itertuples():
            change = over_full(record, row.policy, "kept", budget) - over_full(
                record, "snapkv", "kept", budget
            )
            interval = bootstrap.interval(bootstrap.ratio(change, np.ones(len(change))))
            assert (row.value, row.low, row.high) == pytest.approx(
                (change.mean(), interval.low, interval.high), abs=1e-9
            )
            assert (row.p < 0.05) == (row.low > 0 or row.high < 0)
    is_reference = frame["policy"] == "leave-one-out-kl"
    assert frame["p_holm"][is_reference].isna().all()
    tested = frame[~is_reference]
    ascending = sorted(tested["p"])
    adjusted = [min(1, max((4 - i) * ascending[i] for i in range(place + 1))) for place in range(4)]
    assert sorted(tested["p_holm"]) == pytest.approx(adjusted)
    with refused("'knorm' was not judged with near tokens 'kept'; choose from snapkv, h2o, random"):
        record.differences("knorm")
    assert set(record.differences("snapkv", "reread")["policy"]) == {"knorm"}


def test_p_is_that_of_a_t_test_where_all_groups_weigh_the_same():
    """Six groups whose squared changes are the same have five degrees of freedom."""
    texts = np.repeat(np.arange(6), 4)
    values = np.repeat([3.0, 1.0, 3.0, 1.0, 3.0, 1.0], 4)
    bootstrap = ClusterBootstrap(texts)
    draws = bootstrap.ratio(values, np.ones(len(values)))
    expected = ttest_1samp(values[::4], 0).pvalue
    assert bootstrap.p_value(draws) == pytest.approx(expected, rel=1e-6)


def plain_best(record, near, budget, seed, halved):
    order = list(dict.fromkeys(record.targets[halved]))
    order = np.random.default_rng([Stream.HALVES, seed]).permutation(order).tolist()
    halves = [np.array([value in order[: len(order) // 2] for value in record.targets[halved]])]
    halves.append(~halves[0])
    policies = [policy for policy, _, of_policy in WAYS if of_policy == near]
    chosen = []
    for half in halves:
        kl = {p: values_of(record, p, near, budget, "kl_nats")[half].mean() for p in policies}
        chosen.append(min(kl, key=kl.get))
    on_second = over_full(record, chosen[0], near, budget)[halves[1]]
    on_first = over_full(record, chosen[1], near, budget)[halves[0]]
    return chosen, (on_first.mean() + on_second.mean()) / 2


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
        chosen, expected = plain_best(record, row.near, row.budget, seed, halved)
        assert [row.first, row.second] == chosen
        assert row.value == pytest.approx(expected)


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
    few = replace(
        record, losses=record.losses[(record.losses[["policy", "budget"]] != ["h2o", 0.5]).any(axis=1)]
    )
    frame = few.differences("h2o")
    assert set(frame["budget"]) == {0.25}
    row = frame[frame["policy"] == "snapkv"].iloc[0]
    change = over_full(record, "snapkv", "kept", 0.25) - over_full(record, "h2o", "kept", 0.25)
    assert row["value"] == pytest.approx(change.mean())


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
    bootstrap = ClusterBootstrap.of(record.targets)
    for row in frame.itertuples():
        change = over_full(record, row.policy, near, row.budget)
        change -= over_full(record, row.blind, "reread", row.budget)
        draws = bootstrap.ratio(change, np.ones(len(change)))
        assert row.value == pytest.approx(change.mean())
        assert (row.low, row.high) == pytest.approx(tuple(vars(bootstrap.interval(draws)).values())[1:3])
        assert row.p == pytest.approx(bootstrap.p_value(draws))
    ascending = sorted(frame["p"])
    count = len(ascending)
    adjusted = [min(1, max((count - i) * ascending[i] for i in range(n + 1))) for n in range(count)]
    assert sorted(frame["p_holm"]) == pytest.approx(adjusted)
    assert f"aware, near {near}, less blind" in set(record.every_number()["frame"])


def test_differences_of_some_policies_are_adjusted_for_these_alone():
    record = made_up()
    frame = record.differences("snapkv", "kept", ["random"])
    assert set(frame["policy"]) == {"random"}
    everything = record.differences().set_index(["policy", "budget"])
    for row in frame.itertuples():
        assert row.value == everything.loc[("random", row.budget), "value"]
    first, second = sorted(frame["p"])
    assert sorted(frame["p_holm"]) == pytest.approx([min(1, 2 * first), min(1, max(2 * first, second))])
    with refused("'knorm' was not judged with near tokens 'kept'; choose from snapkv, h2o, random"):
        record.differences("snapkv", "kept", ["knorm"])


def test_policies_that_keep_the_same_keys_differ_in_no_test_and_agree_once():
    ways = [(name, "nothing", "reread") for name in "abcde"]
    record = made_up(ways=ways)
    alike = record.losses["policy"].isin(["a", "b"])
    losses = record.losses.copy()
    losses.loc[losses["policy"] == "b", ["loss_nats", "kl_nats"]] = losses.loc[
        losses["policy"] == "a", ["loss_nats", "kl_nats"]
    ].to_numpy()
    assert alike.sum() == 4 * B * BLOCKS
    record = replace(record, losses=losses)
    frame = record.differences("a", "reread")
    of_same = frame[frame["policy"] == "b"]
    assert (of_same["value"] == 0).all() and of_same["p_holm"].isna().all()
    others = frame[frame["policy"] != "b"]
    count = len(others)
    assert others["p_holm"].min() == pytest.approx(min(1, count * others["p"].min()))
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
    frame = record.agreement_tells().set_index(["budget", "name"])
    for budget in BUDGETS:
        losses = [over_full(record, name, "reread", budget).mean() for name, _ in names]
        for agreement in ("overlap", "spearman"):
            rows = record.choices[record.choices["budget"] == budget].groupby("policy")[agreement]
            means = [rows.get_group(name).astype(float).mean() for name, _ in names]
            assert frame.loc[(budget, agreement), "value"] == pytest.approx(
                spearmanr(means, losses).statistic
            )
            assert frame.loc[(budget, agreement), "n_policies"] == 4
    assert (frame["low"] >= -1).all() and (frame["high"] <= 1).all()
    order = {name: -over_full(record, name, "reread", 0.5).mean() for name, _ in names}
    overlap = record.choices["policy"].map(order).fillna(0.0).astype(np.float32)
    tells = replace(record, choices=record.choices.assign(overlap=overlap)).agreement_tells()
    row = tells[(tells["budget"] == 0.5) & (tells["name"] == "overlap")]
    assert row["value"].item() == pytest.approx(-1)


def test_how_many_heads_keep_given_tokens():
    record = made_up()
    with refused("no kept sets were saved; measure with kept_sets=True"):
        record.keeps(pd.DataFrame({"block": [0], "name": ["key"], "column": [1]}))
    generator = np.random.default_rng(3)
    shares = list(generator.random((len(record.choices), 8)).astype(np.float32))
    record = replace(record, choices=record.choices.assign(kept_share=shares))
    tokens = pd.DataFrame(
        [
            (block, name, (block + shift) % 8)
            for block in range(10)
            for name, shift in (("key", 0), ("key", 3), ("value", 5))
        ],
        columns=["block", "name", "column"],
    )
    frame = record.keeps(tokens)
    assert len(frame) == len(WAYS) * len(BUDGETS) * 3
    by_name = frame.set_index(["policy", "near", "budget", "name"])["value"].sort_index()
    for row in frame.itertuples():
        if row.name == "key less value":
            of_row = by_name[row.policy, row.near, row.budget]
            assert row.value == pytest.approx(of_row["key"] - of_row["value"]) and row.low < row.value
            continue
        choices = record.choices
        rows = choices[
            (choices[["policy", "near", "budget"]] == [row.policy, row.near, row.budget]).all(axis=1)
        ]
        by_block = dict(zip(rows["block"], rows["kept_share"], strict=True))
        of_name = tokens[tokens["name"] == row.name]
        means = [by_block[block][of["column"]].mean() for block, of in of_name.groupby("block")]
        assert row.value == pytest.approx(np.mean(means))


def test_comparisons_on_other_texts_are_pooled():
    first, second = made_up(), made_up(seed=1)
    pooled = EvictionResult.pool({"books": first, "code": second})
    assert pooled.counts == {"targets": 2 * B * BLOCKS, "blocks": 2 * BLOCKS, "documents": 24, "groups": 12}
    assert pooled.targets["target_id"].tolist() == list(range(2 * B * BLOCKS))
    assert (pooled.targets["target_id"] // B == pooled.targets["block"]).all()
    over = [over_full(one, "h2o", "kept", 0.5) for one in (first, second)]
    np.testing.assert_array_equal(over_full(pooled, "h2o", "kept", 0.5), np.concatenate(over))
    frame = pooled.summary().set_index(["policy", "near", "budget", "name"])["value"]
    assert frame["h2o", "kept", 0.5, "loss_over_full_nats"] == pytest.approx(np.concatenate(over).mean())
    overlaps = [
        one.choices.loc[one.choices["policy"] == "random", "overlap"].mean() for one in (first, second)
    ]
    of_random = pooled.choices.loc[pooled.choices["policy"] == "random", "overlap"]
    assert of_random.mean() == pytest.approx(np.mean(overlaps), rel=1e-6)
    assert pooled.settings.blocks_requested == 2 * BLOCKS and pooled.settings.texts.name == "books, code"
    other = replace(second, settings=second.settings.but(sinks=0))
    with refused("comparisons that are pooled need the same settings: sinks 1 -> 0"):
        EvictionResult.pool({"books": first, "code": other})
    without = replace(second, targets=second.targets.drop(columns="group"))
    with refused("some of the comparisons have groups and some none"):
        EvictionResult.pool({"books": first, "code": without})


def test_what_is_of_other_settings_or_there_twice_is_not_put_together():
    first = made_up()
    with refused("parts that are joined need the same settings: sinks 1 -> 0"):
        EvictionResult.of_parts([first, replace(first, settings=first.settings.but(sinks=0))])
    with refused("block 0 is in two of the parts; give each block once"):
        EvictionResult.of_parts([first, made_up()])
    of_other_model = replace(made_up(seed=1), settings=first.settings.but(model_sha256="other"))
    with refused("comparisons that are pooled need the same settings: model_sha256"):
        EvictionResult.pool({"books": first, "code": of_other_model})


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
    with refused("'knorm' was not judged with near tokens 'kept'; choose from snapkv, h2o, random"):
        record.differences("knorm")
    with refused("nothing was judged at a budget of 0.3; choose from 0.25, 0.5"):
        record.table(0.3)


def test_the_placebo_has_its_own_rows_and_no_gain_to_share():
    record = made_up(far_contexts=("true", "placebo"))
    frame = record.summary()
    rows = frame[frame["far_context"] == "placebo"]
    assert set(rows["name"]) == {"loss_over_full_nats", "kl_nats", "spearman", "overlap"}
    over = values_of(record, "h2o", "kept", 0.5, far_context="placebo")
    over -= values_of(record, "full", "kept", 1.0, far_context="placebo")
    row = rows[(rows[["policy", "budget", "name"]] == ["h2o", 0.5, "loss_over_full_nats"]).all(axis=1)]
    assert row["value"].item() == pytest.approx(over.mean())


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
    figure = eviction_figure(record.summary(), record.best_found(), BUDGETS)
    kept, reread = figure.axes
    labels = [{line.get_label() for line in axes.get_lines()} for axes in (kept, reread)]
    assert {"snapkv", "h2o", "random", "leave-one-out-kl", BEST} <= labels[0]
    assert {"knorm", BEST} <= labels[1] and "snapkv" not in labels[1]
    [line] = [line for line in kept.get_lines() if line.get_label() == "h2o"]
    expected = [over_full(record, "h2o", "kept", budget).mean() for budget in BUDGETS]
    np.testing.assert_allclose(np.array(line.get_ydata(), dtype=float), expected)
