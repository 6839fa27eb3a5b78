"""Loss over that with the full cache against the budget, from tidy frames (docs/eviction.md [ours])."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from analysis.cache_eviction.numbers import LOSS
from analysis.cache_eviction.record import AWARE
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.contexts import TRUE
from analysis.figures import style

BEST = "best found"
"""The line of what is best on half of the groups, measured on the other half."""
_TITLES = {
    NEAR_KEPT: "Aware of the near tokens, which are kept",
    NEAR_REREAD: "Blind to the near tokens, which are read again",
}
_OF_BOTH = "Near tokens are read again"
"""The title where aware policies stand beside blind ones."""
_BLIND = ":blind=1"
_OF_FORMS = [(0, (2, 1.2)), (0, (6, 1, 1, 1)), (0, (1, 0.8)), (0, (10, 2))]
"""Lines of the forms of one policy or reference, such as ``h2o:mean=1``, which have its color and hollow markers."""
_LOOKS: dict[str, style.Look] = {
    "h2o": {"color": "#D55E00", "marker": "v", "linestyle": "-"},
    "snapkv": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "ada-snapkv": {"color": "#56B4E9", "marker": "^", "linestyle": "-"},
    "tova": {"color": "#E69F00", "marker": "s", "linestyle": "-"},
    "expected-attention": {"color": "#009E73", "marker": "D", "linestyle": "-"},
    "knorm": {"color": "#882255", "marker": "X", "linestyle": (0, (5, 1.5))},
    "keydiff": {"color": "#CC79A7", "marker": "P", "linestyle": (0, (5, 1.5))},
    "kvzip": {"color": "#8C6D00", "marker": "p", "linestyle": (0, (5, 1.5))},
    "streaming-llm": {"color": "0.45", "marker": ">", "linestyle": (0, (1, 0.8))},
    "random": {"color": "0.35", "marker": "d", "linestyle": "-."},
    "random-by-head": {"color": "0.2", "marker": "h", "linestyle": "-."},
    "nearest": {"color": "0.62", "marker": "<", "linestyle": "-."},
    "leave-one-out-kl": {"color": "#D01C8B", "marker": (4, 1, 0), "linestyle": (0, (9, 1.5))},
    "halving-kl": {"color": "#5D3A9B", "marker": (5, 1, 0), "linestyle": (0, (9, 1.5))},
    "presence-gradient": {"color": "#7FA800", "marker": (6, 1, 0), "linestyle": (0, (9, 1.5))},
    "greedy-kl": {"color": "#00325E", "marker": (3, 1, 0), "linestyle": (0, (9, 1.5))},
    BEST: {"color": "#000000", "marker": "*", "linestyle": (0, (7, 1, 1, 1, 1, 1))},
}
"""Of policies, controls and references; blind policies look as aware ones that stand in the other panel."""


def drawn(policies: pd.DataFrame, near: str) -> list[str]:
    """Names of those of `EvictionRecord.policies` that the panel of one way of the near tokens shows.

    Beside another panel, that of near tokens that are read again has no aware policies: what these lose by that is in
    the numbers.
    """
    of_near = policies[policies["near"] == near]
    if near == NEAR_REREAD and policies["near"].nunique() > 1:
        of_near = of_near[of_near["sees"] != AWARE]
    return of_near["policy"].tolist()


@matplotlib.rc_context(style.STYLE)
def eviction_figure(
    summary: pd.DataFrame, best: pd.DataFrame | None, budgets: Sequence[float], *, heading: str = ""
) -> Figure:
    """A panel for each way of the near tokens, a line for each policy, control and reference.

    Near tokens are kept as read behind policies that have seen them, and read again behind blind ones. Frames are those
    of `analysis.cache_eviction.numbers`; ``heading``: what was measured, above the panels.
    """
    frames = [summary[summary["name"] == LOSS]]
    if best is not None:
        frames.append(best[best["name"] == LOSS].assign(policy=BEST, sees=""))
    rows = pd.concat(frames)
    rows = rows[rows["far_context"] == TRUE].drop(columns="far_context")
    rows["percent"] = 100 * rows["budget"]
    shown = {}
    for near in _TITLES:
        of_panel = rows[(rows["near"] == near) & rows["policy"].isin(drawn(rows, near))]
        if len(of_panel):
            shown[near] = of_panel.assign(label=panel_labels(of_panel["policy"]))
    looks = policy_looks(list(pd.concat(shown.values())["label"].unique()))

    width = style.PAGE if len(shown) > 1 else 4.6
    figure = style.new_figure(width, 4.2)
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (near, of_panel) in zip(panels, shown.items(), strict=True):
        style.draw(axes, of_panel, looks, "label", "percent", step=0.02)
        style.log_axis(axes, [100 * budget for budget in budgets])
        axes.axhline(0, **style.REFERENCE)
        is_of_both = near == NEAR_REREAD and (of_panel["sees"] == AWARE).any()
        axes.set_title(_OF_BOTH if is_of_both else _TITLES[near])
        axes.set_xlabel("budget [% of the far keys, sinks included]")
    panels[0].set_ylabel("loss over that with the full cache [nats per token]")
    style.add_legend(figure, looks)
    style.add_heading(figure, heading, style.says_intervals("bars", rows))
    return figure


def panel_labels(policies: pd.Series) -> pd.Series:
    """Names of policies of one panel, without what says that they are blind where no aware form stands beside them."""
    plain = policies.str.replace(_BLIND, "", regex=False)
    has_both = plain.isin(policies)
    return policies.where(has_both, plain)


def policy_looks(labels: Sequence[str]) -> dict[str, style.Look]:
    """The look of every label; those that are not named here get what is left, in their order."""
    looks = {}
    forms: dict[str, Iterator[Any]] = defaultdict(lambda: cycle(_OF_FORMS))
    others = style.selector_styles([label for label in labels if _name_of(label) not in _LOOKS])
    for label in labels:
        name = _name_of(label)
        if name not in _LOOKS:
            looks[label] = others[label]
        elif name == label:
            looks[label] = _LOOKS[name]
        else:
            looks[label] = _LOOKS[name] | {"markerfacecolor": "white", "linestyle": next(forms[name])}
    return looks


def _name_of(label: str) -> str:
    """The policy, control or reference that a label has a form of."""
    return label.partition(":")[0]
