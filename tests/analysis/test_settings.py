"""Settings of a measurement: what is compared when, and that a saved result has them all, flat."""

import json
from dataclasses import replace

import pytest

from analysis.settings import OtherModel, Settings
from tests.support.refusals import refused
from tests.support.results import made_result

OTHER = OtherModel("runs/b", "e" * 64, 2)
MAY_DIFFER = {
    "resumed": {"model", "training_seed", "texts", "read_with", "complete"},
    "joined": {"model", "model_sha256", "training_seed"},
    "verified": {
        "model", "training_seed", "texts", "texts_sha256", "read_with", "scores", "effects", "faithfulness", "subsets",
        "keep_rate", "complete",
    },
    None: set(),
}  # fmt: skip
"""Which settings may differ, written out once more."""


def changed(settings, name):
    """The same settings with another value of one."""
    value = settings.to_json()[name]
    others = {
        bool: lambda: not value,
        int: lambda: value + 1,
        float: lambda: value + 1.0,
        str: lambda: f"{value}x",
    }
    if name == "n_short":
        return settings.but(n_short=value - 1)
    if name in ("selected_by", "proposed_by"):
        return replace(settings, **{name: OTHER})
    if name == "read_with":
        return settings.but(read_with={"encoding": "latin-1"})
    if isinstance(value, list):
        return settings.but(**{name: [*value, *value]} if value else {name: [1]})
    return settings.but(**{name: 7 if value is None else others[type(value)]()})


@pytest.mark.parametrize("when", MAY_DIFFER)
def test_what_may_differ_is_what_stands_here(when):
    settings = made_result().settings
    flat = settings.to_json()
    assert settings.differences(Settings.from_json(flat), when=when) == ""
    differing = set()
    for name in flat:
        other = changed(settings, name)
        assert {key for key, value in other.to_json().items() if value != flat[key]} == {name}
        text = settings.differences(other, when=when)
        assert text in ("", f"{name} {json.dumps(flat[name])} -> {json.dumps(other.to_json()[name])}")
        differing |= {name} if text else set()
    assert differing == set(flat) - MAY_DIFFER[when]
    assert settings.differences(changed(settings, "n_long"), when=when, but_for=("n_long",)) == ""


def test_another_model_is_the_same_where_its_weights_are():
    settings = replace(made_result().settings, selected_by=OTHER)
    moved = replace(settings, selected_by=replace(OTHER, name="elsewhere", training_seed=3))
    assert settings == moved and settings.differences(moved) == ""
    assert settings.differences(replace(settings, selected_by=replace(OTHER, sha256="f" * 64))) != ""


def test_an_older_record_gets_defaults_and_one_of_another_version_is_refused():
    settings = made_result().settings
    flat = settings.to_json()
    added_later = ("keep_as", "scores", "read_with", "documents", "special_tokens", "losses_not_over_tau")
    assert Settings.from_json({name: flat[name] for name in flat if name not in added_later}) == settings
    with refused("settings of another version: n_middle; measure again"):
        Settings.from_json({**flat, "n_middle": 3})
    with refused("lacks settings"):
        Settings.from_json({name: flat[name] for name in flat if name != "n_long"})
    with pytest.raises(AttributeError):
        settings.complete = False


def test_all_is_json():
    settings = replace(made_result(crossfit=True).settings, proposed_by=OTHER)
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
