"""Names of selectors: parsed, written again, and compared by what they say."""

from itertools import combinations

import pytest

from analysis.options import check_options
from analysis.policies.attention import SnapKV
from analysis.selectors import BLIND, SELECTORS, SIGNED, SelectorName, list_selectors, register
from analysis.selectors.names import RankedIn, Screen
from analysis.settings import ChoiceSettings, ContextSettings
from tests.support.refusals import refused

SAME = [
    ["leave-one-out", "leave-one-out/text", "leave-one-out/text:0"],
    ["leave-one-out/cache", "leave-one-out/cache:0", "leave-one-out/cache:00"],
    ["leave-one-out/cache:4", "leave-one-out/cache:04"],
    ["leave-one-out/text:4", "leave-one-out/text:004"],
    ["leave-one-out-kl/cache:4", "leave-one-out-kl/cache:04"],
    ["leave-one-out@gradient:9", "leave-one-out@gradient:09"],
    ["leave-one-out@leave-one-out/cache:2:9", "leave-one-out/text@leave-one-out/cache:02:9"],
    ["leave-one-out-kl/cache:4@gradient:9/other-near", "leave-one-out-kl/cache:04@gradient:09/other-near"],
    ["snapkv", "snapkv:window=32", "snapkv:blind=0:pool=5"],
    ["snapkv:window=4:pool=3", "snapkv:pool=3:window=04", "snapkv:window=4:pool=3:blind=0"],
    ["ada-snapkv:safe=0.5", "ada-snapkv:safe=.50", "ada-snapkv:safe=0.5:window=32"],
    ["expected-attention:epsilon=0.00001", "expected-attention:epsilon=.000010"],
    ["greedy@snapkv:9", "greedy@snapkv:pool=5:9"],
    ["attention/other-near"],
    ["attention"],
]
"""Names of one selector each; the first is how ``str()`` writes it."""


@pytest.mark.parametrize("names", SAME, ids=lambda names: names[0])
def test_names_of_one_selector_are_equal_and_are_written_in_one_way(names):
    parsed = [SelectorName.parse(name) for name in names]
    assert {*map(str, parsed)} == {names[0]}
    assert {*parsed, SelectorName.parse(names[0])} == {parsed[0]}


def test_names_of_different_selectors_differ():
    for one, other in combinations(SAME, 2):
        assert SelectorName.parse(one[-1]) != SelectorName.parse(other[-1])


@pytest.mark.parametrize("listed", list_selectors())
def test_what_is_listed_is_written_without_its_defaults(listed):
    base = listed.partition(":")[0]
    assert SelectorName.parse(listed) == SelectorName(base)
    assert str(SelectorName.parse(listed)) == base


def test_a_name_is_taken_apart():
    assert SelectorName.parse("leave-one-out-kl/cache:4@snapkv:pool=7:32/other-near") == SelectorName(
        "leave-one-out-kl",
        ranked_in=RankedIn("cache", 4),
        screen=Screen(SelectorName("snapkv", (("pool", 7),)), 32),
        other_near=True,
    )


def check(*names):
    contexts = ContextSettings(n_long=40, n_short=5, seed=0)
    choices = ChoiceSettings(tau_nats=0.0, ks=(1, 4), selectors=names, far_contexts=("true",))
    check_options(contexts, choices)


@pytest.mark.parametrize("names", [names for names in SAME if len(names) > 1], ids=lambda names: names[0])
def test_one_selector_named_in_two_ways_is_refused(names):
    check("random", names[0])
    for other in names[1:]:
        with refused(f"name at least one selector, and each once: {other} is {names[0]} again"):
            check(names[0], "random", other)


def test_a_selector_that_is_named_twice_is_refused():
    check()  # losses alone
    with refused("name at least one selector, and each once: random is random again"):
        check("random", "random")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("leave-one-out", {"reads_subsequences"}),
        ("leave-one-out/text:4", {"reads_subsequences"}),
        ("leave-one-out/cache", {"ranks_in_cache"}),
        ("spans/cache:2@leave-one-in:9", {"reads_subsequences", "ranks_in_cache"}),
        ("halving/other-near", {"reads_subsequences"}),
        ("greedy/cache:2/other-near", {"ranks_in_cache"}),
        ("gradient", {"reads_subsequences"}),
        ("leave-one-out/cache@gradient:9", {"reads_subsequences", "ranks_in_cache"}),
        ("attention", set()),
        ("random@nearest:9", set()),
        ("attention@leave-one-out-kl/cache:4:9", {"ranks_in_cache"}),
        ("snapkv:window=4", {"chooses_by_head"}),
        ("snapkv:window=4/other-near", {"chooses_by_head"}),
        ("attention@h2o:9/other-near", {"chooses_by_head"}),
        ("saliency", {"changes_embeddings"}),
        ("leave-one-out/cache@input-x-gradient:9", {"changes_embeddings", "ranks_in_cache"}),
        ("integrated-gradients:steps=7/other-near", {"changes_embeddings"}),
    ],
)
def test_a_name_says_what_the_model_must_be_able_to_do(name, says):
    parsed = SelectorName.parse(name)
    questions = ("reads_subsequences", "ranks_in_cache", "chooses_by_head", "changes_embeddings")
    assert {question for question in questions if getattr(parsed, question)} == says


@pytest.fixture
def add_selector(monkeypatch):
    """`register`, undone at the end of the test."""

    def add(name, *arguments, **flags):
        monkeypatch.setitem(SELECTORS, name, None)
        return register(name, *arguments, **flags)

    return add


def test_a_selector_of_a_user_says_so_too(add_selector):
    add_selector("mine", BLIND)(SnapKV)
    add_selector("mine-as-it-is", BLIND)(SnapKV(window=4))
    add_selector("alone", SIGNED, by_subsets=True, scores_only_k=True)(lambda inputs: None)
    assert SelectorName.parse("mine:window=4@alone/cache:2:9").chooses_by_head
    assert SelectorName.parse("mine-as-it-is").chooses_by_head
    assert str(SelectorName.parse("mine:window=4@alone/cache:2:9")) == "mine:window=4@alone/cache:2:9"
    assert str(SelectorName.parse("mine-as-it-is")) == "mine-as-it-is"
    assert SelectorName.parse("alone").reads_subsequences
    assert SelectorName.parse("alone/cache").ranks_in_cache
    assert not SelectorName.parse("alone/cache").reads_subsequences
    with pytest.raises(TypeError, match="by_subset"):
        add_selector("misspelt", SIGNED, by_subset=True)(lambda inputs: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random@nearest:9/other-near", "random@nearest:9 does not look at the near tokens"),
        ("@", "'@' is no screened selector; write EXACT@PROPOSER:m"),
        ("leave-one-out@gradient", "is no screened selector"),
        (
            "leave-one-out@gradient:x/other-near",
            "'leave-one-out@gradient:x/other-near' is no screened selector",
        ),
        ("leave-one-out@:9", "is no screened selector"),
        ("leave-one-out@attention@gradient:9", "unknown selector 'attention@gradient'"),
        (
            "leave-one-out@attention/cache:9",
            "attention reads no subsets to rank by; in the cache rank leave-one-out,",
        ),
        ("leave-one-out/", "'': subsets are ranked in text or cache"),
        ("leave-one-out/cache:x@gradient:9", "'cache:x': subsets are ranked in text or cache"),
        ("", "unknown selector ''"),
    ],
)
def test_what_is_no_name_is_refused(name, message):
    with refused(message):
        SelectorName.parse(name)
