"""Exact match against an option of training: what is drawn is what the records say."""

import numpy as np
import pytest

from analysis.plots.options import option_figure
from analysis.stats.exact_match import OPTION_DEFAULTS, by_option, load_records, pool
from olmo_sparsity.config.load import Config
from olmo_sparsity.config.schema import field_value
from olmo_sparsity.util.errors import UserError
from tests.support.drawn import legend_names
from tests.support.made_up_exact_match import record, row, write, write_options, write_schemes, write_sparse

OPTIONS = ["positions.coupled_share", "positions.id_noise"]


@pytest.fixture
def folder(tmp_path):
    write_options(tmp_path / "records")
    return tmp_path / "records"


def groups_of(*folders):
    return pool(load_records(folders))


def test_defaults_are_those_of_the_config():
    assert {name: field_value(Config(), name) for name in OPTION_DEFAULTS} == OPTION_DEFAULTS


def test_curves_are_the_records_by_value(folder):
    figure = option_figure(by_option(groups_of(folder), OPTIONS))
    shares, noises = figure.axes
    assert [label.get_text() for label in shares.get_xticklabels()] == ["0.05", "0.5", "1"]
    assert [label.get_text() for label in noises.get_xticklabels()] == ["0", "0.1", "0.4"]
    assert [line.get_label() for line in shares.lines] == ["20", "60", "100", "200"]
    for axes, name, values in ((shares, OPTIONS[0], (0.05, 0.5, 1.0)), (noises, OPTIONS[1], (0, 0.1, 0.4))):
        for line in axes.lines:
            expected = []
            for value in values:
                wanted = {} if value in (0, 1) else {name: value}
                own = [each for each in load_records([folder]) if each.settings.options == wanted]
                counts = [
                    r.exact / r.samples
                    for each in own
                    for r in each.rows
                    if str(r.length) == line.get_label()
                ]
                assert len(counts) == 2  # seeds
                expected.append(100 * np.mean(counts))
            np.testing.assert_allclose(line.get_ydata(), expected)
    assert legend_names(figure) == [
        "20 bits, 1×", "60 bits, 3×", "100 bits, 5×", "200 bits, 10×",
    ]  # fmt: skip


def test_what_cannot_be_drawn_is_said(folder, tmp_path):
    write_sparse(tmp_path / "sparse")
    write_schemes(tmp_path / "schemes")
    write(tmp_path / "one" / "a", record([row(20, 5)], "scratchpad_parity"))
    for given, names, told in (
        ([folder], ["max_duration"], "max_duration: is none of"),
        ([tmp_path / "sparse"], OPTIONS, "tasks without planted tokens"),
        ([tmp_path / "schemes"], OPTIONS, "differ in .*scheme.*task"),
        ([folder], OPTIONS[:1], "differ in positions.id_noise, too"),
        ([tmp_path / "one"], OPTIONS[:1], "fewer than two"),
    ):
        with pytest.raises(UserError, match=told):
            by_option(groups_of(*given), names)


def test_records_without_a_length_that_is_drawn_are_told_which_to_measure(tmp_path):
    for share in (1, 0.5):
        options = {} if share == 1 else {OPTIONS[0]: share}
        value = record([row(10, 5), row(25, 5)], "scratchpad_parity", options=options)
        write(tmp_path / str(share), value)
    with pytest.raises(UserError, match="no length of 20, 60, 100, 200 .* in all records; measure"):
        option_figure(by_option(groups_of(tmp_path), OPTIONS[:1]))


def test_the_command_draws_it(folder, tmp_path, run_here):
    options = ("--out", tmp_path / "out", "--by", *OPTIONS)
    assert run_here("scripts/figure1.py", folder, *options).returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "figure1-options.pdf", "figure1-options.png", "figure1.json",
    ]  # fmt: skip
