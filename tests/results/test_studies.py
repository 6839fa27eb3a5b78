"""Every script of results/ that prints numbers of a page, on a cut of its records: a renamed column must not pass.

That the numbers are right is tested where they are computed, in `tests/analysis/stats/`.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import Result, load, load_study, measure
from analysis.measurement import save_study
from analysis.stats import numbers
from analysis.stats.comparisons import smallest_k_differences
from analysis.stats.tables import interval_text
from tests.support.small_measurement import assert_same, small

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
GROUPS = 5
"""A cut has so many groups or, without groups, texts; from four on there are intervals."""
OVER, BELOW = 6, 2
"""And of each, at most so many targets over tau in each cell, and so many others."""
CUT = ("books", "languages", "length", "encodings", "demo")
JSON = (
    *(f"languages/{name}/length" for name in ("english", "french", "german", "spanish", "russian", "python")),
    *(f"length/{name}" for name in ("ladder", "together")),
    "encodings",
    "encodings/length-mesa",
)
"""Folders of records of the probes, which are small and stay whole."""
ENCODINGS = r"/(rope|pose|nope|alibi|fox),|control/"
"""Of encodings: a correlation needs four models."""
CELLS = tuple(
    f"smollm2-{name}-n256" for name in ("releases", "releases-seed-1", "document", "units", "code-tau-0.1")
)
"""Of real models: one of each kind."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of all studies, cut: every cell, with few targets."""
    folder = tmp_path_factory.mktemp("results")
    for name in JSON:
        (folder / name).mkdir(parents=True)
        for path in (RESULTS / name).glob("*.json"):
            if path.name != "result.json":
                shutil.copy(path, folder / name)
        for probe in ("length", "needle"):
            for path in (RESULTS / name).glob(f"{probe}.parquet"):
                shutil.copy(path, folder / name)
    for name in CUT:
        study = load_study(RESULTS / name)
        if name == "encodings":
            study = {cell: result for cell, result in study.items() if re.search(ENCODINGS, cell)}
        save_study(folder / name, cut(study))
    study = load_study(RESULTS / "models")
    save_study(folder / "models", {cell: study[cell] for cell in CELLS})
    for name in ("length", "planted", "policies", "recent", "story", "checkpoint"):
        shutil.copytree(RESULTS / "models" / name, folder / "models" / name)
    for path in (RESULTS / "models").glob("*.parquet"):
        if path.name.startswith("halves-"):
            shutil.copy(path, folder / "models")
    return folder


def cut(study: Mapping[str, Result]) -> dict[str, Result]:
    """Few targets of every cell; those that were measured on the same targets keep the same."""
    families: dict[bytes, list[str]] = {}
    for cell, result in study.items():
        places = result.targets[["text", "position"]].to_numpy().tobytes()
        families.setdefault(places, []).append(cell)
    smaller = {}
    for cells in families.values():
        kept = np.unique(np.concatenate([rows_of_cut(study[cell]) for cell in cells]))
        for cell in cells:
            result = study[cell]
            targets = result.targets.iloc[kept].reset_index(drop=True)
            chosen = result.choices["target_id"].isin(targets["target_id"])
            choices = result.choices[chosen].reset_index(drop=True)
            smaller[cell] = replace(result, targets=targets, choices=choices)
    return {cell: smaller[cell] for cell in study}


def rows_of_cut(result: Result) -> np.ndarray:
    """Of the groups with most targets over tau, the first targets that are over it and that are not."""
    targets = result.targets.reset_index(drop=True)
    group = targets["group"] if "group" in targets else targets["text"]
    largest = (
        targets["over_tau"].groupby(group).sum().sort_values(ascending=False, kind="stable").index[:GROUPS]
    )
    rows = [
        of_group[of_group["over_tau"] == over].index[:count].to_numpy()
        for name, of_group in targets.groupby(group)
        if name in set(largest)
        for over, count in ((True, OVER), (False, BELOW))
    ]
    return np.concatenate(rows)


@pytest.fixture
def run(records: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a script prints, read from the cut; it draws no picture of a page."""

    def output(script: str, *arguments: str, of: str = "") -> str:
        folder = of or Path(script).parent.as_posix()
        before = pictures()
        module = import_module(f"results.{script.replace('/', '.')}")
        module.main(["--records", str(records / folder), *arguments])
        assert pictures() == before
        return capsys.readouterr().out

    def pictures() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*.png")}

    return output


def numbers_of(folder: Path, of: str, **wanted: Any) -> dict[str, float]:
    """By far context, the values of the rows of numbers.csv in which the columns have these values."""
    rows = pd.read_csv(folder / "numbers.csv", low_memory=False)
    for name, value in {"of": of, **wanted}.items():
        rows = rows[rows[name] == value]
    return dict(zip(rows["far_context"], rows["value"], strict=True))


def line_of(text: str, *parts: str) -> str:
    """The one line that holds all of these."""
    [line] = [line for line in text.splitlines() if all(part in line for part in parts)]
    return line


def test_books(run: Callable[..., str], records: Path, tmp_path: Path) -> None:
    printed = run("books/study", "--numbers", str(tmp_path / "numbers.csv"))
    study = load_study(records / "books")
    assert "nan" not in printed
    for cell in study:
        assert f"\n{cell}: " in printed
    both = Result.join([study["n128-m32-seed-1"], study["n128-m32-seed-2"]])
    [net] = numbers.recovery(both, selector="leave-one-out-kl", far_context="net", k=4).to_dict("records")
    of_both = printed.split("n128-m32, both runs")[1]
    assert f"leave-one-out-kl net k=4: {interval_text(net, percent=True, digits=0)} %" in of_both
    between = printed.split("Seed 1 minus seed 2, paired\n")[1].split("all numbers")[0]
    assert between.count("leave-one-out-kl") == 15
    written = numbers_of(tmp_path, "n128-m32, both runs", frame="recovery", selector="leave-one-out-kl", k=4)
    assert written["net"] == pytest.approx(net["value"], rel=1e-5)


def test_languages(
    run: Callable[..., str], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results.languages.study.RESAMPLES", 1000)
    printed = run("languages/study", "--figures", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv"))
    study = load_study(records / "languages")
    french = Result.join([study["french/seed-1"], study["french/seed-2"]])
    [net] = numbers.recovery(french, selector="leave-one-out-kl", far_context="net", k=4).to_dict("records")
    assert interval_text(net, percent=True, digits=0) in line_of(printed, "french", " of ")
    assert "python without multiprocessing and unittest" in printed
    assert "times as frequent as under uniform choice" in printed
    written = numbers_of(tmp_path, "french", frame="recovery", selector="leave-one-out-kl", k=4)
    assert written["net"] == pytest.approx(net["value"], rel=1e-5)
    assert (tmp_path / "languages.png").is_file()


@pytest.mark.slow
def test_length(run: Callable[..., str], records: Path, tmp_path: Path) -> None:
    printed = run("length/study", "--figures", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv"))
    one = load_study(records / "length")["influence/config=nope,seed=1"]
    [share] = numbers.shares(one).query("name == 'share_over_tau'").to_dict("records")
    assert f"over_tau {interval_text(share, percent=True)} %" in line_of(printed, "NoPE,", "suffice")
    written = pd.read_csv(tmp_path / "numbers.csv").query(
        "model == 'NoPE' and name == 'over_tau' and of_seed == '1'"
    )
    assert written["value"].tolist() == pytest.approx([share["value"]], rel=1e-5)
    assert printed.count("(cross-fit)") == 8
    drawn = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
    assert drawn == ["sizes/ladder.png"]


@pytest.mark.slow
def test_encodings(
    run: Callable[..., str], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results.encodings.study.RESAMPLES", 20)
    printed = run("encodings/study", "--figures", str(tmp_path), "--numbers", str(tmp_path / "numbers.csv"))
    study = load_study(records / "encodings")
    control = Result.join([study[f"control/rope-512,seed={seed}"] for seed in (1, 2)])
    [gain] = numbers.shares(control).query("name == 'gain_nats'").to_dict("records")
    assert line_of(printed, "control", " gain_nats").endswith(f"gain_nats {interval_text(gain, digits=2)}")
    assert len([line for line in printed.splitlines() if line.startswith("| RoPE ")]) == 2 * 12
    assert line_of(printed, "all: net with the rise: ").endswith(", 5 models")
    assert (tmp_path / "joint.png").is_file()
    written = pd.read_csv(tmp_path / "numbers.csv").query("model == 'RoPE' and name == 'rise'")
    assert written["of"].nunique() == 4 and set(written["of_seed"]) == {"together", "1", "2"}


def test_demo(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("demo/study", "--numbers", str(tmp_path / "numbers.csv"))
    assert "parts of the gain of leave-one-out, by its blind form leave-one-out-kl" in printed
    written = pd.read_csv(tmp_path / "numbers.csv")["of"].unique()
    assert {"all runs", "three placebos", "seed 6198", "beside uniform choice"} <= set(written)
    assert "of the first tokens of seed 6198, the share that seed 1 chooses, too" in printed
    assert "rank correlation of losses on the same subsets, placebo: 0.26 [0.21, 0.31]" in printed


@pytest.mark.slow
def test_differences(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("differences", "--numbers", str(tmp_path / "numbers.csv"), of=".")
    titles = ("languages, corrected for 10", "Python, corrected for 5", "books, corrected for 3")
    for title in (*titles, "sizes, corrected for 6", "encodings, seed 1, corrected for 6"):
        assert title in printed
    assert "pose16 − rope" in printed
    assert "demo: gain under the other [nats] " in printed
    written = pd.read_csv(tmp_path / "numbers.csv").query("of == 'books' and name == 'share_over_tau'")
    assert sorted(written["confidence"].round(4)) == [0.95] * 3 + [0.9833] * 3


@pytest.mark.slow
def test_real_models(run: Callable[..., str], records: Path, tmp_path: Path) -> None:
    csv = tmp_path / "numbers.csv"
    printed = run("models/study", "--figures", str(tmp_path), "--numbers", str(csv))
    study = load_study(records / "models")
    document = study["smollm2-document-n256"]
    [there] = numbers.placebos(document, selector="leave-one-out-kl", far_context="same-group", k=4).query(
        "level == 'cache' and name == 'recovery'"
    )["value"]
    [placebo] = numbers.placebos(document, selector="leave-one-out-kl", far_context="placebo", k=4).query(
        "level == 'cache' and name == 'recovery'"
    )["value"]
    of_document = printed.split("smollm2-document-n256, elsewhere in the document")[1]
    assert f"{100 * (there - placebo):.1f} [" in of_document
    of_document = numbers.recovery(document, selector="leave-one-out-kl", k=4)
    written = pd.read_csv(csv, low_memory=False).query("of == 'smollm2-document-n256, recovery' and k == 4")
    assert written["value"].tolist() == pytest.approx(of_document["value"].tolist(), rel=1e-5)
    neighbors = printed.split("four choices with their neighbors, mean")[1]
    assert line_of(neighbors.split("\n\n")[0], "tokens") == "tokens   9.72"
    assert "smollm2-code-tau-0.1-n256, by half, sinks add" in printed
    seconds = document.provenance["seconds"] / len(document.targets)
    assert line_of(printed, "smollm2-document-n256 256 ").split()[-6] == f"{seconds:.1f}"
    story = printed.split("the story\n")[1].split("\n\n")[0]
    assert re.findall(r"\d+\.\d\d", story) == ["281.00", "75.00", "193.78", "14.00", "190.74"]
    assert line_of(printed, " compass  compass ").split() == [
        "264",
        "compass",
        "compass",
        "255",
        "9.0",
        "7.4",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {csv.name, "smollm2-releases-n256.png"}


@pytest.mark.parametrize(
    "script, records_of, shown, drawn",
    [
        ("context_lengths", "models", "smollm2-books-n1024: from 33 to 128 tokens back", "recent.png"),
        ("halves", "models", "even_over_tau_too", ""),
        ("planted", "models/planted", "recall of nothing but the sentence", "planted.png"),
        ("policies", "models/policies", "loss less that of attention", "policies.png"),
    ],
)
@pytest.mark.slow
def test_scripts_beside_real_models(
    run: Callable[..., str], tmp_path: Path, script: str, records_of: str, shown: str, drawn: str
) -> None:
    csv = tmp_path / "numbers.csv"
    arguments = ["--numbers", str(csv)]
    if drawn:
        arguments += ["--figures", str(tmp_path)]
    assert shown in run(f"models/{script}", *arguments, of=records_of)
    assert {path.name for path in tmp_path.iterdir()} == {csv.name, *filter(None, [drawn])}
    assert {"of", "name", "value", "low", "high"} <= {*pd.read_csv(csv)}


def test_four_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import_module("results.models.four_bits").compare(["--numbers", str(tmp_path / "numbers.csv")])
    assert "of four chosen tokens 94% are the same" in capsys.readouterr().out
    same = numbers_of(tmp_path, "the same tokens", selector="leave-one-out-kl", k=4)
    assert round(100 * same["true"]) == 94


def test_retrieval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the whole record."""
    import_module("results.retrieval.study").main(["--numbers", str(tmp_path / "numbers.csv")])
    of_yarn = capsys.readouterr().out.split("RoPE + YaRN: exact match by context")[1]
    assert "89 [84, 94]" in line_of(of_yarn.split("\n\n")[0], "mean", " 34 [27, 40]")
    written = pd.read_csv(tmp_path / "numbers.csv")
    mean = written[written["model"].eq("RoPE + YaRN") & written["name"].eq("exact") & written["depth"].isna()]
    [value] = mean.query("value_tokens == 1 and length == 512")["value"]
    assert round(100 * value) == 89
    assert set(written.query("of == 'recall'")["selector"]) >= {"leave-one-out-kl", "chance"}


@pytest.mark.slow
def test_synthetic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the whole records, which are small."""
    import_module("results.synthetic.study").main(["--numbers", str(tmp_path / "numbers.csv")])
    printed = capsys.readouterr().out
    windows = printed.split("windows/records: exact match")[1].split("\n\n")[0]
    assert "rope_window 7 0 100 600 20.3 [0.0, 98.3] 4.5 56.5 0" in re.sub(" +", " ", windows)
    written = pd.read_csv(tmp_path / "numbers.csv").query("part == 'windows/records' and length == 100")
    assert written.query("model.str.endswith('rope_window 7')")["of_seeds"].tolist() == ["4.5 56.5 0"]
    assert line_of(printed, "records/sparse/8/", " 150 ").split()[-3:] == ["15.9", "[0.4,", "31.4]"]
    assert "scratchpad_parity/leave-one-out-kl/seed=1" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of run.sh, one of them interrupted, are collected and printed; half floats hold the effects."""
    study = import_module("results.cache.study")
    exact = "leave-one-out-kl/cache:4"
    settings: dict[str, Any] = {"targets_per_block": 8, "targets": 32, "tau_nats": 0.5}
    whole = small(
        **settings, ks=(1, 4, 16), selectors=(exact, "attention"), keep_as=("cache:4",), effects=True
    )
    whole.save(tmp_path / "out" / "smollm2-code-n256")
    two_before = [f"text:4/{unit}:2" for unit in ("before", "behind", "ranked", "drawn")]
    ladder = small(
        **settings,
        selectors=(exact,),
        keep_as=("text:4", *two_before, *(f"cache:4/read:{window}" for window in (1, 2, 4, 16)), "cache:4"),
        placebos=("placebo", "other-target"),
        batches=(0, 1),
    )
    ladder.save(tmp_path / "out" / "smollm2-code-ladder" / "parts" / "targets-00000000")
    longer = small(**settings, ks=(1, 4), selectors=(exact,), keep_as=("cache:4",), batches=(0, 1))
    longer.save(tmp_path / "out" / "smollm2-code-n1024")
    settings["seed"] = 1  # of releases, whose N 256 is missing
    other = small(**settings, ks=(1, 4), selectors=(exact,), keep_as=("cache:4",), batches=(0, 1))
    other.save(tmp_path / "out" / "smollm2-releases-n1024")
    records = tmp_path / "records"
    study.main(["collect", str(tmp_path / "out"), "--records", str(records)])
    csv = tmp_path / "numbers.csv"
    study.main(["--records", str(records), "--figures", str(tmp_path), "--numbers", str(csv)])
    printed = capsys.readouterr().out

    [net] = numbers.recovery(whole, selector=exact, far_context="net", k=4).to_dict("records")
    of_k_4 = printed.split("smollm2-code-n256, recovery as cache:4/token")[1]
    assert interval_text(net, percent=True, digits=0) in of_k_4
    written = pd.read_csv(csv)
    chosen = ladder.choices.query("far_context == 'true' and unit == 'before:2'")
    read = [
        len({i - back for i in row[:4] for back in range(3)} | set(range(4))) for row in chosen["selected"]
    ]
    rung = written[written["of"] == "smollm2-code-ladder, far tokens read and kept"]
    rung = rung.query("way == 'text/before:2' and name == 'tokens_read' and k == 4")
    assert rung["value"].item() == pytest.approx(np.mean(read), rel=1e-5)
    step = written[written["of"] == "smollm2-code-ladder, one way to keep less another"]
    step = step.query("way == 'cache/token' and less == 'text/before:2' and far_context == 'true' and k == 4")
    of_ways = numbers.recovery(ladder, far_context="true", k=4).set_index(["level", "unit"])["value"]
    expected = of_ways["cache", "token"] - of_ways["text", "before:2"]
    assert step["value"].item() == pytest.approx(expected, rel=1e-5)
    needed = written[written["of"] == "smollm2-code-n1024 less N 256, enough from k or fewer"]
    expected = smallest_k_differences(longer, whole)
    np.testing.assert_allclose(needed[["k", "value"]], expected[["k", "value"]], rtol=1e-5, atol=1e-12)
    both = len(longer.over) + len(other.over)
    together = f"SmolLM2, n1024 of 2 texts together, {both} targets, recovery"
    together = written[(written["of"] == together) & (written["far_context"] == "net")]
    shares = [
        numbers.recovery(of_text, selector=exact, far_context="net")["value"] for of_text in (longer, other)
    ]
    gains = [of_text.gain_nats[of_text.over].sum() for of_text in (longer, other)]
    np.testing.assert_allclose(together["value"], np.average(shares, axis=0, weights=gains), rtol=1e-5)
    less = written[written["of"] == "SmolLM2, n1024, code together less N 256, recovery"]
    less = less.query("far_context == 'net' and k == 4")["value"].item()
    of_code = numbers.recovery(longer, selector=exact, far_context="net", k=4)["value"].item()
    assert less == pytest.approx(of_code - net["value"], abs=1e-5)
    assert (tmp_path / "needed.png").is_file()
    effects = np.load(records / "effects-smollm2-code-n256.npz")
    kl_nats = np.exp(effects["log_kl"].astype(float))
    np.testing.assert_allclose(kl_nats, np.stack(whole.effects["kl_nats"]), rtol=0.01, atol=1e-6)

    study.main(["restore", str(tmp_path / "restored"), "--records", str(records)])
    [folder] = (tmp_path / "restored").iterdir()
    restored = load(folder)
    assert restored.settings == whole.settings
    assert restored.effects["target_id"].tolist() == whole.effects["target_id"].tolist()
    for name in ("kl_nats", "loss_change_nats"):
        given, measured = np.stack(restored.effects[name]), np.stack(whole.effects[name])
        np.testing.assert_allclose(given, measured, rtol=0.005, atol=1e-6)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_script_of_the_cache_for_a_gpu_measures_its_texts_in_turn(tmp_path: Path) -> None:
    gpu = import_module("results.cache.gpu")
    pages = sorted((ROOT / "docs").glob("*.md"))
    paths = [tmp_path / "even.jsonl", tmp_path / "odd.jsonl"]
    for first, path in enumerate(paths):
        lines = [json.dumps({"text": page.read_text(encoding="utf8")}) for page in pages[first::2]]
        path.write_text("\n".join(lines), encoding="utf8")
    checkpoint = str(RESULTS / "checkpoint")
    gpu.main([checkpoint, str(tmp_path / "out"), *map(str, paths), "--tiny", "--minutes", "60"])
    measured = load_study(tmp_path / "out")
    assert [*measured] == ["even-n64", "odd-n64"]
    assert [len(result.effects) for result in measured.values()] == [64, 64]
    expected = measure(checkpoint, [paths[1]], **gpu.settings_of(4096, tiny=True))
    assert_same(measured["odd-n64"], replace(expected, texts=None))
    for name in ("kl_nats", "loss_change_nats"):
        effects = (np.stack(result.effects[name]) for result in (measured["odd-n64"], expected))
        np.testing.assert_array_equal(*effects)
    speed = json.loads((tmp_path / "out" / "speed.json").read_text(encoding="utf8"))
    of_text = pd.DataFrame(speed).groupby("text")["over_tau"].agg(["size", "sum"])
    assert of_text["size"].tolist() == [4, 4]
    assert of_text["sum"].tolist() == [len(result.over) for result in measured.values()]


@pytest.mark.usefixtures("small_batches")
def test_texts_of_the_ladder_are_taken_together() -> None:
    """Two cells of other targets give what one measurement of all these targets gives."""
    study = import_module("results.cache.study")
    settings: dict[str, Any] = {"targets_per_block": 8, "targets": 32, "tau_nats": 0.5}
    settings |= {"selectors": ("attention",), "keep_as": ("text:4/before:2", "text:4/ranked:2")}
    cells = {
        f"smollm2-{text}-ladder": small(**settings, batches=(batch,)) for batch, text in enumerate(("a", "b"))
    }
    together = numbers.recovery(study.of_all_texts(cells))
    assert together["value"].tolist() == numbers.recovery(small(**settings))["value"].tolist()


@pytest.mark.usefixtures("small_batches")
def test_a_cell_is_collected_where_its_parts_were_measured(tmp_path: Path) -> None:
    """Batches that were measured on two machines, one of them on both, give what one machine gives."""
    study = import_module("results.cache.study")
    settings: dict[str, Any] = {"targets_per_block": 8, "targets": 32, "tau_nats": 0.5, "effects": True}
    settings |= {"selectors": ("leave-one-out-kl/cache:4",), "keep_as": ("cache:4",), "ks": (1, 4)}
    batches = [small(**settings, batches=(batch,)) for batch in (0, 1)]
    for name, machines in {"apart": ((1,), (0, 1)), "once": ((0, 1),)}.items():
        for number, measured in enumerate(machines):
            out = tmp_path / f"{name}-{number}"
            for batch in measured:
                batches[batch].save(out / "smollm2-code-n256" / "parts" / f"{batch}")
            study.collect(out, tmp_path / name)
    [apart], [once] = (load_study(tmp_path / name).values() for name in ("apart", "once"))
    assert_same(apart, once)
    assert len(once.targets) == sum(len(batch.targets) for batch in batches)
    of = [
        study.with_effects(once, study.effects_path(tmp_path / name, "smollm2-code-n256"))
        for name in ("apart", "once")
    ]
    np.testing.assert_array_equal(*(np.stack(result.effects["kl_nats"]) for result in of))


@pytest.mark.parametrize(
    ("pieces", "place", "run"),
    [
        (["see", " https", "://", "a", ".b", " now"], 3, "https://a.b"),
        (["the", " cat", "'s", " tail", ",", " it"], 1, "cat's"),
        (["the", " ", "tail", ",\n", "it"], 2, "tail,"),
        (["a", "\n", "b"], 1, "b"),
    ],
)
def test_a_word_is_what_stands_between_spaces(pieces: list[str], place: int, run: str) -> None:
    assert import_module("results.cache.study").run_around(pieces, place) == run
