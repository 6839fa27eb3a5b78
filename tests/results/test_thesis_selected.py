"""The study of chosen training text (`results/thesis/selected`): thirds by plain loops, a planted difference, and cells
of a tiny model from the ranking to the tables."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem
from scipy.stats import t as student
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from analysis import Result
from analysis.measuring import measure
from analysis.stats.bootstrap import holm
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles
from tests.support import small_measurement, tiny
from tests.support.jackknife import jackknife

choose = import_module("results.thesis.selected.choose")
collect = import_module("results.thesis.selected.collect")
study = import_module("results.thesis.selected.study")

SIZES = np.array([140, 60, 40, *[20] * 8, *[6] * 10])
"""Targets of every held-out package, as unequal as those of the docstrings."""


def scores(rng: np.random.Generator, count: int) -> pd.DataFrame:
    """Documents with lengths as skewed as those of the docstrings, and scores that go with them a little."""
    tokens = 384 + rng.lognormal(6.5, 1.2, count).astype(int)
    return pd.DataFrame(
        {
            "text": np.arange(count) * 2,
            "group": [f"package {number}" for number in rng.integers(9, size=count)],
            "tokens": tokens,
            "n_targets": 128,
            "gain_nats": rng.normal(size=count),
            "gain_error_nats": 0.1,
            "net_gain_nats": rng.normal(size=count) + 0.2 * np.log(tokens),
            "net_gain_error_nats": 0.5,
            "long_nats": rng.normal(size=count),
        }
    )


# --- thirds ---


@pytest.mark.parametrize("count", [7, 30, 100, 1001])
def test_thirds_are_the_first_ten_of_thirty_neighbors_by_length(count):
    documents = scores(np.random.default_rng(count), count)
    strata = choose.strata_of(documents["tokens"].to_numpy())
    placed = np.concatenate(strata)
    assert len(placed) == len(set(placed)) == count // 3 * 3
    left_out = documents["tokens"].drop(index=placed)
    assert (left_out <= documents["tokens"][placed].min()).all()
    for stratum in strata:
        assert len(stratum) % 3 == 0 and (count < 60 or 27 <= len(stratum) <= 36)
    for longer, shorter in pairwise(strata):
        assert documents["tokens"][longer].min() >= documents["tokens"][shorter].max()

    thirds = choose.thirds_of(documents)
    assert list(thirds) == ["top", "easy", "random-2", "random-3", "random-4"]
    for rows in thirds.values():
        assert len(set(rows)) == count // 3
    for stratum in strata:
        by_gain = sorted(stratum, key=lambda row: documents["net_gain_nats"][row], reverse=True)
        by_loss = sorted(stratum, key=lambda row: documents["long_nats"][row])
        assert set(by_gain[: len(stratum) // 3]) == set(thirds["top"]) & set(stratum)
        assert set(by_loss[: len(stratum) // 3]) == set(thirds["easy"]) & set(stratum)
        assert len(set(thirds["random-3"]) & set(stratum)) == len(stratum) // 3
    if count > 100:
        also_drawn = len(set(thirds["random-2"]) & set(thirds["random-4"])) / (count // 3)
        assert also_drawn == pytest.approx(1 / 3, abs=0.1)


@pytest.mark.parametrize("less", [0, 1, 5, 40, 300])
def test_the_longest_documents_lose_their_ends_a_token_at_a_time(less):
    tokens = np.array([90, 20, 120, 120, 50, 118])
    kept = choose.cut(tokens, tokens.sum() - less)
    expected = tokens.copy()
    for _ in range(less):
        [*_, last] = np.flatnonzero(expected == expected.max())
        expected[last] -= 1
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("seed", range(4))
def test_all_thirds_have_as_many_documents_and_tokens(seed):
    documents = scores(np.random.default_rng(seed), 400)
    kept = choose.kept_tokens(documents)
    with_ends = kept.sum() + (kept > 0).sum()
    assert set((kept > 0).sum()) == {133}
    assert with_ends.nunique() == 1 and with_ends.iloc[0] % 256 == 128
    thirds = choose.thirds_of(documents)
    whole = {name: (documents["tokens"][rows] + 1).sum() for name, rows in thirds.items()}
    assert min(whole.values()) - with_ends.iloc[0] <= 256
    assert (kept.le(documents["tokens"], axis=0)).all(axis=None)
    for name, rows in thirds.items():
        assert set(np.flatnonzero(kept[name])) == set(rows)


# --- the statistic ---


def losses(
    rng: np.random.Generator,
    effect: float = 0.0,
    *,
    sizes: np.ndarray = SIZES,
    of_package: float = 0.05,
    of_seed: float = 0.02,
) -> pd.DataFrame:
    """Sums over targets by document, of three seeds of each third, where top gains more by so many nats.

    ``of_package`` and ``of_seed``: standard deviations over packages, and over trainings, of the gain.
    """
    group = np.repeat(np.arange(len(sizes)), 2)
    counts = np.repeat(sizes // 2, 2)
    usual = rng.normal(2, 0.3, len(group))
    by_third = {third: of_package * rng.normal(size=len(sizes)) for third in study.THIRDS}
    frames = []
    for third, of_packages in by_third.items():
        for seed in (2, 3, 4):
            gain = 0.3 + effect * (third == "top") + of_packages[group] + of_seed * rng.normal()
            noise = rng.normal(size=len(group)) / np.sqrt(counts)
            frame = pd.DataFrame({"third": third, "seed": seed, "text": np.arange(len(group))})
            frame["group"] = [f"package {number}" for number in group]
            frame["n_targets"] = counts
            # of generators of their own, so that no draw of the gains changes
            of_long, of_placebo = (own.normal(size=len(group)) for own in rng.spawn(2))
            long = usual + 0.1 * of_long
            frame["long"] = counts * long
            frame["short"] = counts * (long + gain + 0.3 * noise)
            frame["placebo"] = counts * (long + 0.4 * gain + 0.2 * of_placebo)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def plain_means(sums: pd.DataFrame) -> pd.DataFrame:
    """Of every outcome, over all targets and seeds of each third."""
    of_third = sums.groupby("third")[["short", "long", "placebo", "n_targets"]].sum()
    means = of_third.div(of_third["n_targets"], axis="index")
    return pd.DataFrame(
        {
            "gain_nats": means["short"] - means["long"],
            "net_gain_nats": means["placebo"] - means["long"],
            "long_nats": means["long"],
            "short_nats": means["short"],
        }
    )


def test_the_difference_and_its_intervals_equal_plain_loops():
    """By package alone, and by package and seed."""
    sums = losses(np.random.default_rng(0), 0.1)
    frame = study.difference_frame(sums.sample(frac=1, random_state=0))
    [row] = frame[frame["test"] == "primary"].to_dict("records")

    def top_less_random(rows: np.ndarray) -> float:
        gains = plain_means(sums.iloc[rows])["gain_nats"]
        return gains["top"] - gains["random"]

    value, of_packages, freedom = jackknife(top_less_random, sums["group"])
    _, of_seeds, freedom_of_seeds = jackknife(top_less_random, sums["seed"])
    assert row["value"] == pytest.approx(value)
    quantiles = student.ppf(0.975, [freedom, freedom_of_seeds])
    half = quantiles[0] * of_packages
    assert row["low_by_package"] == pytest.approx(value - half)
    assert row["high_by_package"] == pytest.approx(value + half)
    variances = np.square([of_packages, of_seeds])
    half = variances @ quantiles / variances.sum() ** 0.5
    assert row["low"] == pytest.approx(value - half)
    assert row["high"] == pytest.approx(value + half)
    assert np.mean([row[f"seed_{seed}"] for seed in (2, 3, 4)]) == pytest.approx(value)


@pytest.mark.slow
def test_a_planted_difference_is_seen_without_bias_and_its_interval_holds_it():
    """Also where trainings differ more than packages: an interval by package alone is about these trainings."""
    rng = np.random.default_rng(1)
    for of_seed in (0.0, 0.1):
        rows = []
        for _ in range(60):
            pairs = study.paired(losses(rng, 0.08, of_seed=of_seed), "top", "random")
            rows.append(study.difference(pairs, "gain_nats"))
        frame = pd.DataFrame(rows)
        assert frame["value"].mean() == pytest.approx(0.08, abs=4 * sem(frame["value"]))
        assert ((frame["low"] <= 0.08) & (frame["high"] >= 0.08)).mean() >= 0.9
        if of_seed:
            assert ((frame["low_by_package"] <= 0.08) & (frame["high_by_package"] >= 0.08)).mean() < 0.85
        assert (frame["detectable"] > (frame["high"] - frame["low"]) / 2).all()


@pytest.mark.slow
def test_how_often_an_interval_by_package_holds_the_truth_where_trainings_differ():
    """Prints the share that the page gives (pytest -s)."""
    rng = np.random.default_rng(8)
    held = {"low": [], "low_by_package": []}
    for _ in range(500):
        pairs = study.paired(losses(rng, 0.08, of_seed=0.1), "top", "random")
        row = study.difference(pairs, "gain_nats")
        for low, of_low in held.items():
            of_low.append(row[low] <= 0.08 <= row[low.replace("low", "high")])
    of_both, by_package = (np.mean(values) for values in held.values())
    print(f"the truth is held by package and seed in {of_both:.0%}, by package alone in {by_package:.0%}")
    assert of_both > 0.92 and by_package < 0.8


TESTS = [
    ("primary", "gain_nats", "top", "random"),
    ("secondary", "gain_nats", "top", "easy"),
    ("secondary", "long_nats", "top", "random"),
    ("secondary", "long_nats", "top", "easy"),
    ("secondary", "net_gain_nats", "top", "random"),
    ("beside", "short_nats", "top", "random"),
    ("beside", "short_nats", "top", "easy"),
    ("beside", "gain_nats", "easy", "random"),
    ("beside", "long_nats", "easy", "random"),
]
"""Those of the page: kind, outcome, and the two thirds of which the first has the second taken off."""


def test_every_test_is_a_plain_difference_of_means_and_the_secondary_are_adjusted():
    sums = losses(np.random.default_rng(9), 0.1)
    means = plain_means(sums)
    # the placebo's loss is not that of the short context and a constant
    assert (means["net_gain_nats"] - means["gain_nats"]).abs().min() > 0.01
    of_thirds = study.mean_frame(sums).set_index(["third", "name"])["value"]
    assert of_thirds.to_dict() == pytest.approx(means.stack().to_dict())
    frame = study.difference_frame(sums)
    assert frame[["test", "name", "first", "second"]].apply(tuple, axis=1).tolist() == TESTS
    expected = [means.loc[first, name] - means.loc[second, name] for _, name, first, second in TESTS]
    assert frame["value"].tolist() == pytest.approx(expected)
    is_secondary = frame["test"] == "secondary"
    assert is_secondary.sum() == 4
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"].where(is_secondary)), nan_ok=True)


def test_the_net_gain_is_related_with_its_sign():
    documents = scores(np.random.default_rng(11), 50)
    documents["tokens"] = 400 + documents["net_gain_nats"].rank().astype(int)
    documents["long_nats"] = -documents["net_gain_nats"]
    relations = study.relation_frame(documents).set_index("with")["spearman"]
    assert relations.index.tolist() == ["gain_nats", "long_nats", "tokens"]
    assert relations["tokens"] == pytest.approx(1) and relations["long_nats"] == pytest.approx(-1)
    ranks = documents[["net_gain_nats", "gain_nats"]].rank()
    assert relations["gain_nats"] == pytest.approx(np.corrcoef(ranks, rowvar=False)[0, 1])


def test_two_seeds_are_pooled_and_few_packages_have_no_interval():
    sums = losses(np.random.default_rng(3))
    two = study.difference_frame(sums[sums["seed"] < 4])
    np.testing.assert_allclose(two["low"], two["low_by_package"])
    few = study.difference_frame(losses(np.random.default_rng(3), sizes=np.array([20, 20, 20])))
    assert few["value"].notna().all() and few[["low", "high", "p", "detectable"]].isna().all(axis=None)


def test_scores_and_thirds_are_described():
    documents = scores(np.random.default_rng(4), 300)
    documents = documents.join(choose.kept_tokens(documents))
    of_score = study.score_frame(documents).set_index("score")
    net = documents["net_gain_nats"]
    assert of_score.loc["net_gain_nats", "q33"] == pytest.approx(np.quantile(net, 1 / 3))
    assert of_score.loc["net_gain_nats", "reliability"] == pytest.approx(1 - 0.25 / net.var())
    assert np.isnan(of_score.loc["long_nats", "reliability"])
    of_subset = study.subset_frame(documents).set_index("subset")
    for name in ("top", "easy", "random-2", "random-4"):
        chosen = documents[documents[name] > 0]
        shown = of_subset.loc[name]
        for other in ("top", "easy"):
            assert shown[f"also_{other}"] == pytest.approx((chosen[other] > 0).mean())
        assert shown["net_gain_nats"] == pytest.approx(chosen["net_gain_nats"].mean())
        tokens = chosen.groupby("group")[name].sum()
        assert tokens[shown["largest_package"]] == tokens.max()
        assert shown["its_share"] == pytest.approx(tokens.max() / tokens.sum())


# --- cells of a tiny model ---


def words(documents: list[list[int]]) -> list[str]:
    """Documents of token ids as text."""
    return [" ".join(f"w{token}" for token in document) for document in documents]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder as run.sh leaves it, without trainings: a small random model stands for all of them."""
    folder = tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(5)
    lengths = [700, 400, 390, 500, 660, 620, 380, 800, 900, 410, 430, 999]
    train = [rng.integers(1, 50, length).tolist() for length in lengths]
    heldout = [rng.integers(1, 50, 90).tolist() for _ in range(8)]
    corpus = tiny.write_corpus(folder / "data", {"train": train, "heldout": heldout})
    tiny.add_groups(corpus, [f"package {number % 4}" for number in range(8)])
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(corpus / "tokenizer.json"))
    settings: dict[str, Any] = small_measurement.SMALL | {
        "n_long": 24,
        "selectors": (),
        "targets_per_block": 8,
    }
    by_package: dict[str, list[str]] = {}
    for number, text in enumerate(words(train)):
        by_package.setdefault(f"package {number // 3}", []).append(text)
    ranking = measure(small_measurement.model(), by_package, **{**settings, "targets": 200})
    ranking.save(folder / "selected" / "ranking")
    return folder


@pytest.fixture(scope="module")
def with_corpora(out):
    """The same with thirds as corpora, as `prepare-data` makes them, and results in place of nine trainings'."""
    selected = out / "selected"
    choose.main([str(out / "data"), str(selected / "ranking"), str(selected / "chosen")])
    for subset in study.SUBSETS:
        settings = PrepareSettings(
            "text",
            files=(str(selected / "chosen" / f"{subset}.jsonl"),),
            heldout_files=(str(selected / "chosen" / "heldout.jsonl"),),
            group_field="group",
            tokenizer=str(out / "data" / "tokenizer.json"),
            decontaminate=False,
            near_copy_tokens=0,
        )
        prepare(settings, selected / f"data-{subset}", workers=1)
    for number, third in enumerate(study.THIRDS):
        for seed in (2, 3, 4):
            result = small_measurement.small(
                small_measurement.model(10 * number + seed), selectors=(), targets_per_block=5, n_long=24
            )
            result.save(selected / f"heldout-{third}-{seed}")
    return out


def test_texts_of_thirds_are_those_of_the_corpus(with_corpora):
    selected = with_corpora / "selected"
    table = pd.read_parquet(selected / "chosen" / "scores.parquet")
    ranking = Result.load(selected / "ranking")
    of_documents = ranking.targets.groupby("text")
    net = of_documents.apply(lambda rows: (rows["loss_placebo_nats"] - rows["loss_long_nats"]).mean())
    np.testing.assert_allclose(table["net_gain_nats"], net, rtol=1e-6)
    np.testing.assert_allclose(table["long_nats"], of_documents["loss_long_nats"].mean(), rtol=1e-6)
    assert len(table) == 12
    corpus = TokenFiles.of_split(with_corpora / "data", "train")
    windows = set()
    for subset in study.SUBSETS:
        files = TokenFiles.of_split(selected / f"data-{subset}", "train")
        chosen = table[table[subset] > 0]
        assert len(chosen) == len(files.document_bounds) == 4
        for place, (number, tokens) in enumerate(zip(chosen["text"], chosen[subset], strict=True)):
            np.testing.assert_array_equal(files.document(place), corpus.document(number)[:tokens])
        windows.add(files.lengths[0] // 256)
    assert len(windows) == 1
    collect.check_corpora(with_corpora)


def test_cells_are_collected_and_printed(with_corpora, tmp_path, capsys):
    selected = with_corpora / "selected"
    collect.main([str(with_corpora), "--records", str(tmp_path)])
    records = study.Records.load(tmp_path)
    study.main(["--records", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv")])
    printed = capsys.readouterr().out
    targets = Result.load(selected / "heldout-easy-3").targets
    expected = targets.groupby("text")[["loss_short_nats", "loss_long_nats", "loss_placebo_nats"]].sum()
    rows = records.losses.query("third == 'easy' and seed == 3").set_index("text").loc[expected.index]
    np.testing.assert_allclose(rows[["short", "long", "placebo"]], expected, atol=1e-3)
    assert rows["n_targets"].tolist() == targets.groupby("text").size().tolist()
    assert "differences\n" in printed and "subsets\n" in printed
    head = (tmp_path / "records.json").read_text(encoding="utf8")
    assert str(with_corpora) not in head and "heldout-easy-4" in head
    assert set(pd.read_csv(tmp_path / "numbers.csv", low_memory=False)["of"]) >= {"scores", "differences"}


def test_the_figure_is_drawn_with_and_without_positions(tmp_path):
    documents = scores(np.random.default_rng(6), 90)
    documents = documents.join(choose.kept_tokens(documents))
    edges = [(1, 32), (32, 128), (128, 512)]
    rows = [
        {"model": third, "name": study.DIFFERENCE, "from_tokens": start, "to_tokens": end}
        | {"value": 0.1, "low": 0.0, "high": 0.2}
        for third in ("top", "easy")
        for start, end in edges
    ]
    sums = losses(np.random.default_rng(7))
    for number, positions in enumerate([pd.DataFrame(rows), None]):
        folder = tmp_path / str(number)
        frames = {"scores": documents, "losses": sums}
        if positions is not None:
            frames["positions"] = positions
        collect.write_records(folder, {}, **frames)
        study.main(["--records", str(folder), "--figures", str(folder)])
        assert (folder / "chosen.png").is_file()


def test_corpora_and_targets_that_differ_are_refused(with_corpora, tmp_path):
    selected = tmp_path / "selected"
    selected.mkdir()
    for path in (with_corpora / "selected").iterdir():
        if path.name != "heldout-top-3":
            (selected / path.name).symlink_to(path)
    (tmp_path / "data").symlink_to(with_corpora / "data")
    small_measurement.small(selectors=(), targets_per_block=5, n_long=25).save(selected / "heldout-top-3")
    with pytest.raises(SystemExit, match="heldout-top-3 was measured on other targets"):
        collect.main([str(tmp_path), "--records", str(tmp_path / "records")])
    other = tiny.write_corpus(tmp_path / "other", {"train": [[1, 2]], "heldout": [[3, 4]]})
    (selected / "data-wrong").symlink_to(other)
    with pytest.raises(SystemExit, match="data-wrong has another held-out text"):
        collect.main([str(tmp_path), "--records", str(tmp_path / "records")])
    (selected / "data-wrong").unlink()
    manifest = CorpusManifest.load(selected / "data-easy")
    longer = tiny.write_corpus(tmp_path / "longer", {"train": [[1, 2]] * 5, "heldout": [[3, 4]]})
    splits = {**CorpusManifest.load(longer).splits, "heldout": manifest.splits["heldout"]}
    replace(CorpusManifest.load(longer), splits=splits).save(longer)
    (selected / "data-longer").symlink_to(longer)
    with pytest.raises(SystemExit, match="thirds differ in documents, or batches"):
        collect.main([str(tmp_path), "--records", str(tmp_path / "records")])


def test_ids_that_are_merged_when_their_text_is_read_do_not_read_back():
    """As on both sides of an end of text that a text spelled out, and a corpus leaves out."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    assert choose.reads_back(tokenizer, np.array([2, 1, 0]))
    assert not choose.reads_back(tokenizer, np.array([0, 1, 0]))
