"""What `analysis.notebook` measured on one text: numbers, tables, a figure, and a display for Jupyter. Needs no torch.

The display is self-contained HTML without scripts, every text escaped. It sets no background and no text colour of its
own: both are those of the notebook, light or dark, and what is emphasised is a translucent shade over them. What a
shade says is also said by a line, a box or a number.

Shapes: T tokens of the text, n targets, m of them over tau, N long and M short context length, F = N - M far tokens, k
selected tokens. Losses are in nats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape
from importlib.resources import files
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.records.results import INFLUENTIAL_TOKENS
from analysis.records.schema import Targets
from analysis.report.foreign_text import foreign_html, text_html
from analysis.report.words import influence_unit, number, plural
from analysis.stats.recovery import default_selector, nats
from olmo_sparsity.util.files import file_in

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Json = dict[str, Any]

NO_INTERVAL = "one text is one document, and documents are what is resampled: there are no intervals"
UNITS = {"word": r"\S+", "sentence": r"\S.*?(?:[.!?…][\"'”’)\]]*(?=\s|$)|(?=\n\s*\n)|$)"}
"""What `InfluentialTokens.aggregate` adds up over, as patterns: runs of visible characters; what ends with . ! ? or …,
or before an empty line."""
TARGET_COLUMNS = ("position", "token", "kind", "loss_short_nats", "loss_long_nats", "gain_nats")


@dataclass(frozen=True, eq=False)
class Choices:
    """What one selector chose for the targets over tau in one far context."""

    selected: np.ndarray
    """Position ids 0..F-1 of the chosen tokens, most influential first, (m, k)."""
    influence: np.ndarray
    """Influence of each in the selector's unit: nats, or a share of the attention, (m, k)."""
    loss_nats: np.ndarray
    """L_1 … L_k: the loss given the short context and the first 1 … k of them, (m, k)."""


@dataclass(frozen=True, eq=False, repr=False)
class InfluentialTokens:
    """The result of `analysis.notebook.influential_tokens`. In Jupyter it shows itself."""

    pieces: list[str]
    """Text of every token, T; joined they are the text, with the special tokens that the tokenizer added."""
    targets: Targets
    """All measured targets; ``position`` counts tokens of the text. ``document`` is 0; ``placebo_document`` is 0 for
    the text itself and 1 for another one; ``placebo_start`` is -1 where a target has no placebo."""
    choices: dict[str, dict[str, Choices]]
    """By selector, then ``true`` and, where there is one, ``placebo``."""
    placebo_pieces: list[list[str]]
    """Text of the F tokens of the placebo far context of each target over tau; empty where there is no placebo."""
    placebo: str
    """Where the placebo comes from, or why there is none."""
    n_long: int
    n_short: int
    tau_nats: float
    k: int

    @property
    def over(self) -> np.ndarray:
        """Indices into ``targets``, ascending, of those over tau whose tokens were chosen, (m,): all, or the first."""
        finished = min(len(found["true"].selected) for found in self.choices.values())
        return self.targets.over(self.tau_nats)[:finished]

    @property
    def complete(self) -> bool:
        """Whether tokens were chosen for all targets over tau; an interrupt leaves some out."""
        return len(self.over) == len(self.targets.over(self.tau_nats))

    @property
    def gain_nats(self) -> np.ndarray:
        """L_short - L_long of every target, (n,)."""
        return self.targets.selecting_gain_nats

    @property
    def summary(self) -> Json:
        """Number and share of targets over tau; by selector and k: recovery, placebo recovery, net recovery.

        The definitions are those of docs/method.md, 2.2 and 2.3; recoveries are over the targets whose tokens were
        chosen. None stands for what does not exist. There are no intervals: those of `analysis.stats.summary` come from
        resampling documents, and one text is one document.
        """
        over_tau = len(self.targets.over(self.tau_nats))
        return {
            "tokens": len(self.pieces),
            "targets": len(self.targets),
            "targets_over_tau": over_tau,
            "share_over_tau": over_tau / len(self.targets),
            "complete": self.complete,
            "selectors": {
                name: {k: self._recoveries(name, k) for k in range(1, self.k + 1)} for name in self.choices
            },
            "placebo": self.placebo,
            "intervals": NO_INTERVAL,
        }

    def _recoveries(self, selector: str, k: int) -> dict[str, float | None]:
        """Eq. 20 over the targets over tau: Σ (L_short - L_k) / Σ (L_short - L_long)."""
        over = self.over
        gain = float(self.gain_nats[over].sum())
        found: dict[str, float | None] = {"recovery": None, "placebo_recovery": None, "net_recovery": None}
        if len(over) == 0 or gain == 0:
            return found
        short = self.targets.loss_short_nats[over]
        for far_context, key in (("true", "recovery"), ("placebo", "placebo_recovery")):
            if far_context in self.choices[selector]:
                loss = self.choices[selector][far_context].loss_nats[:, k - 1]
                found[key] = float((short - loss).sum()) / gain
        if found["recovery"] is not None and found["placebo_recovery"] is not None:
            found["net_recovery"] = found["recovery"] - found["placebo_recovery"]
        return found

    def targets_frame(self) -> pandas.DataFrame:
        """A row per target, over tau or not, with `TARGET_COLUMNS` and ``over_tau``."""
        import pandas

        over = set(self.targets.over(self.tau_nats).tolist())
        rows = [{**self._target(row), "over_tau": row in over} for row in range(len(self.targets))]
        return pandas.DataFrame(rows, columns=[*TARGET_COLUMNS, "over_tau"])

    def to_pandas(self) -> pandas.DataFrame:
        """A row per target over tau, selector and k.

        Columns: `TARGET_COLUMNS`; ``selector``; ``k``, the rank of the chosen token; ``selected_position`` in the text
        and ``selected_token``, its text; ``distance_tokens`` back from the target; ``influence`` in the selector's
        unit; ``loss_k_nats``, L_k of the first k tokens together; ``placebo_selected_token``, ``placebo_influence``
        and ``placebo_loss_k_nats`` for the placebo far context, missing where there is none.
        """
        import pandas

        placebo = ["placebo_selected_token", "placebo_influence", "placebo_loss_k_nats"]
        chosen = ["selected_position", "selected_token", "distance_tokens", "influence", "loss_k_nats"]
        columns = [*TARGET_COLUMNS, "selector", "k", *chosen, *placebo]
        return pandas.DataFrame(list(self._rows()), columns=columns)

    def top_k(self, k: int = 3, selector: str | None = None) -> pandas.DataFrame:
        """A row per target over tau, the one that gains most first: `TARGET_COLUMNS`, the text of its first k chosen
        tokens, ``chosen``, and L_k of them, ``loss_k_nats``; by default of the selector that others are compared with.
        """
        import pandas

        assert 1 <= k <= self.k
        found = self.choices[selector or default_selector(self.choices)]["true"]
        rows = [
            {
                **self._target(row),
                "chosen": [self._choice({"true": found}, index, rank)["selected_token"] for rank in range(k)],
                "loss_k_nats": float(found.loss_nats[index, k - 1]),
            }
            for index, row in enumerate(self.over.tolist())
        ]
        frame = pandas.DataFrame(rows, columns=[*TARGET_COLUMNS, "chosen", "loss_k_nats"])
        return frame.sort_values("gain_nats", ascending=False, ignore_index=True)

    def aggregate(self, unit: str, selector: str | None = None) -> pandas.DataFrame:
        """A row per ``word`` or ``sentence`` of the text, see `UNITS`; a token belongs to the one that it begins in.

        Columns: ``text``; ``first_position`` and ``last_position`` of its tokens; ``targets`` measured in it and their
        ``gain_nats`` together; ``times_chosen``, how often its tokens are among the k chosen ones of a target, and
        their ``influence`` together, of one selector as in `top_k`.
        """
        import pandas

        text = "".join(self.pieces)
        spans = [match.span() for match in re.finditer(UNITS[unit], text, re.DOTALL)] or [(0, len(text))]
        starts = np.array(list(accumulate(map(len, self.pieces), initial=0))[:-1])
        spaces = np.array([len(piece) - len(piece.lstrip()) if piece.strip() else 0 for piece in self.pieces])
        place = np.searchsorted([start for start, _ in spans], starts + spaces, side="right") - 1
        unit_of = np.maximum(place, 0)
        found = self.choices[selector or default_selector(self.choices)]["true"]
        chosen = self.targets.position[self.over][:, None] - self.n_long + found.selected
        own = unit_of[self.targets.position]

        def total(at: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
            return np.bincount(at.ravel(), None if weights is None else weights.ravel(), minlength=len(spans))

        positions = [np.flatnonzero(unit_of == number) for number in range(len(spans))]
        frame = pandas.DataFrame(
            {
                "text": [text[start:end] for start, end in spans],
                "first_position": [each.min(initial=len(self.pieces)) for each in positions],
                "last_position": [each.max(initial=-1) for each in positions],
                "targets": total(own),
                "gain_nats": total(own, self.gain_nats),
                "times_chosen": total(unit_of[chosen]),
                "influence": total(unit_of[chosen], found.influence),
            }
        )
        return frame[frame["last_position"] >= 0].reset_index(drop=True)

    def plot(self) -> Figure:
        """Recovery against k, a curve per selector; its placebo dashed."""
        from matplotlib.figure import Figure

        from analysis.plots.style import selector_styles

        styles = selector_styles(list(self.choices))
        figure = Figure(figsize=(4.5, 3), layout="constrained")
        axes = figure.subplots()
        ks = range(1, self.k + 1)
        for name, by_k in self.summary["selectors"].items():
            colour, marker, _ = styles[name]
            for key, line, label in (("recovery", "-", name), ("placebo_recovery", "--", f"{name}, placebo")):
                values = [by_k[k][key] for k in ks]
                if None not in values:
                    axes.plot(ks, values, color=colour, marker=marker, linestyle=line, label=label)
        axes.set_xlabel("k [chosen far tokens]")
        axes.set_ylabel("recovery of the gain")
        if axes.lines:
            axes.legend(frameon=False)
        return figure

    def to_html(self, path: str | Path | None = None) -> str:
        """The display as a page of its own; written to ``path`` where one is given."""
        html = f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"></head><body>{_page(self)}</body></html>'
        if path is not None:
            Path(path).write_text(html, encoding="utf8")
        return html

    def save(self, path: str | Path) -> Path:
        """Write the result as JSON and return its path; into a folder, as ``influential_tokens.json``."""
        path = file_in(path, INFLUENTIAL_TOKENS.name)
        columns = {name: column.tolist() for name, column in vars(self.targets).items()}
        choices = {
            name: {
                far: {each: array.tolist() for each, array in vars(found).items()}
                for far, found in by_far.items()
            }
            for name, by_far in self.choices.items()
        }
        INFLUENTIAL_TOKENS.save(path, {**vars(self), "targets": columns, "choices": choices})
        return path

    @classmethod
    def load(cls, path: str | Path) -> InfluentialTokens:
        """What `save` wrote, given its file or folder. Raises `UserError` where it is none, or damaged."""
        found = INFLUENTIAL_TOKENS.load(path)

        def choices_of(columns: Json) -> Choices:
            return Choices(**{name: np.array(each).reshape(-1, found["k"]) for name, each in columns.items()})

        choices = {
            name: {far: choices_of(columns) for far, columns in by_far.items()}
            for name, by_far in found["choices"].items()
        }
        targets = Targets(**{name: np.array(column) for name, column in found["targets"].items()})
        values = {each.name: found[each.name] for each in fields(cls)}
        return cls(**{**values, "targets": targets, "choices": choices})

    def _rows(self) -> Iterator[Json]:
        for index, row in enumerate(self.over.tolist()):
            target = self._target(row)
            for selector, found in self.choices.items():
                for rank in range(self.k):
                    yield {**target, "selector": selector, "k": rank + 1, **self._choice(found, index, rank)}

    def _target(self, row: int) -> Json:
        position = int(self.targets.position[row])
        return {
            "position": position,
            "token": self.pieces[position],
            "kind": str(self.targets.kind[row]),
            "loss_short_nats": float(self.targets.loss_short_nats[row]),
            "loss_long_nats": float(self.targets.loss_long_nats[row]),
            "gain_nats": float(self.gain_nats[row]),
        }

    def _choice(self, found: dict[str, Choices], number: int, rank: int) -> Json:
        """The columns of one chosen token; ``number`` counts targets over tau."""
        true = found["true"]
        column = int(true.selected[number, rank])
        position = int(self.targets.position[self.over[number]]) - self.n_long + column
        row: Json = {
            "selected_position": position,
            "selected_token": self.pieces[position],
            "distance_tokens": self.n_long - column,
            "influence": float(true.influence[number, rank]),
            "loss_k_nats": float(true.loss_nats[number, rank]),
        }
        if "placebo" in found:
            placebo = found["placebo"]
            piece = self.placebo_pieces[number][int(placebo.selected[number, rank])]
            row["placebo_selected_token"] = piece
            row["placebo_influence"] = float(placebo.influence[number, rank])
            row["placebo_loss_k_nats"] = float(placebo.loss_nats[number, rank])
        return row

    def __repr__(self) -> str:
        """One line: how many targets are over tau, and what k tokens bring back."""
        over_tau = len(self.targets.over(self.tau_nats))
        head = (
            f"InfluentialTokens: {over_tau:,} of {len(self.targets):,} targets gain more than "
            f"{nats(self.tau_nats)} (N = {self.n_long}, M = {self.n_short})"
        )
        if not self.complete:
            head += f"; interrupted after {len(self.over):,} of them"
        if over_tau == 0:
            return f"{head}; the most is {self.gain_nats.max():.2f}, lower tau_nats"
        return "; ".join([head, *(self._in_words(name) for name in self.choices)])

    def _in_words(self, selector: str) -> str:
        names = {"recovery": "recovery", "placebo_recovery": "placebo", "net_recovery": "net"}
        values = {names[key]: value for key, value in self._recoveries(selector, self.k).items()}
        said = [f"{name} {value:.0%}" for name, value in values.items() if value is not None]
        if "placebo" not in self.choices[selector]:
            said.append("no placebo")
        return f"{selector}, k = {self.k}: {', '.join(said)}"

    def _repr_html_(self) -> str:
        """The display in Jupyter."""
        return _page(self)


SHADES_NATS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""From these gains on a token is shaded, the more strongly the larger."""
MOST_TOKENS = 4000
"""Tokens of the text that are shown."""
MOST_EXAMPLES = 6
"""Targets whose chosen tokens are shown."""


def _page(result: InfluentialTokens) -> str:
    """The text shaded by gain, recovery by selector and k, and what was chosen for the targets that gain most."""
    css = (files("analysis.report") / "templates" / "notebook.css").read_text(encoding="utf8")
    # the last two classes keep MathJax from reading dollar signs as formulas
    return (
        f'<div class="olmo-influence tex2jax_ignore mathjax_ignore"><style>{css}</style>'
        f"{_heading(result)}{_recovery_table(result)}{_text(result)}{_examples(result)}</div>"
    )


def _heading(result: InfluentialTokens) -> str:
    over, count = len(result.targets.over(result.tau_nats)), len(result.targets)
    rest = (
        "" if over else f" The most is {number(float(result.gain_nats.max()))}: lower <code>tau_nats</code>."
    )
    if not result.complete:
        rest = f" Interrupted: tokens were chosen for the first {len(result.over):,} of them."
    return (
        f"<p><b>{over:,} of {count:,} {plural(count, 'token')}</b> ({number(over / count, scale=100, digits=1)} %) "
        f"{'is' if over == 1 else 'are'} predicted better by more than {nats(result.tau_nats)} from the "
        f"{result.n_long:,} tokens before (N) than from the last {result.n_short:,} of them (M).{rest}</p>"
    )


def _shown_ks(k: int) -> list[int]:
    """1, 2, 4, … and k itself."""
    return [*(2**power for power in range(k.bit_length()) if 2**power < k), k]


def _recovery_table(result: InfluentialTokens) -> str:
    if len(result.over) == 0:
        return ""
    ks = _shown_ks(result.k)
    rows = []
    for name, found in result.summary["selectors"].items():
        for key, words in (
            ("recovery", "recovery"),
            ("placebo_recovery", "placebo"),
            ("net_recovery", "net"),
        ):
            values = [found[k][key] for k in ks]
            cells = "".join(f"<td>{number(value, scale=100, digits=0)}</td>" for value in values)
            strong = ' class="strong"' if key == "net_recovery" else ""
            head = foreign_html(name) if key == "recovery" else ""
            rows.append(
                f'<tr{strong}><td class="words">{head}</td><th scope="row" class="words">{words}</th>{cells}</tr>'
            )
    heads = "".join(f'<th scope="col">k = {k}</th>' for k in ks)
    return (
        '<div class="wide"><table class="numbers"><caption>What the short context and k far tokens bring back of '
        "L<sub>short</sub> − L<sub>long</sub>, in %, over these tokens</caption>"
        f'<thead><tr><th scope="col" class="words">selector</th><td></td>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="soft">Placebo: {text_html(result.placebo)}. One text is one document: no intervals.</p>'
    )


def _text(result: InfluentialTokens) -> str:
    """The text, every target shaded by its gain and underlined where it is over tau."""
    row_of_position = {int(position): row for row, position in enumerate(result.targets.position)}
    over = set(result.targets.over(result.tau_nats).tolist())
    shown = []
    first = int(result.targets.position[0])
    plain = "unmeasured" if first else ""
    for position, piece in enumerate(result.pieces[:MOST_TOKENS]):
        row = row_of_position.get(position)
        if row is None:
            shown.append((plain, "", piece))
            continue
        gain = float(result.gain_nats[row])
        classes = " ".join(filter(None, [_shade(gain), "over" if row in over else ""]))
        shown.append((classes, _about_target(result, row) if classes else "", piece))
    steps = "".join(
        f' <span class="s{i}">&nbsp;{step:g}&nbsp;</span>' for i, step in enumerate(SHADES_NATS, 1)
    )
    left = len(result.pieces) - MOST_TOKENS
    rest = (
        f" The first {MOST_TOKENS:,} tokens are shown; <code>targets_frame()</code> has all."
        if left > 0
        else ""
    )
    return (
        f'<p class="soft">L<sub>short</sub> − L<sub>long</sub> from{steps} nats. <span class="over">Underlined</span>: '
        f'over {result.tau_nats:g}. <span class="unmeasured">Pale</span>: not measured.{rest}</p>'
        f'<div class="text" tabindex="0" role="region" aria-label="The text, shaded by gain">{_spans(shown)}</div>'
    )


def _spans(shown: list[tuple[str, str, str]]) -> str:
    """Pieces of text with (classes, title); neighbours that look the same and have no title are one element."""
    written = []
    for (classes, title), group in groupby(shown, key=lambda each: each[:2]):
        pieces = [piece for _, _, piece in group]
        if not classes:
            written.append(text_html("".join(pieces)))
        elif not title:
            written.append(f'<span class="{classes}">{text_html("".join(pieces))}</span>')
        else:
            marked = (f'<span class="{classes}" title="{title}">{_visible(piece)}</span>' for piece in pieces)
            written.extend(marked)
    return "".join(written)


def _visible(piece: str) -> str:
    """A token that is pointed at, escaped; line breaks, a single space and a part of a character are shown by signs."""
    if not piece or piece.isspace():
        piece = piece.replace("\n", "↵\n").replace(" ", "␣").replace("\t", "⇥") or "∅"
    return text_html(piece)


def _boxed(piece: str, classes: str, mark: str, title: str) -> str:
    """A token in a box with a mark at its end; the space before a word and line breaks are not part of the box."""
    if piece.strip():
        word = piece.lstrip(" ")
        before, shown, behind = piece[: len(piece) - len(word)], _visible(word), ""
    else:
        before, shown, behind = "", _visible(piece).replace("\n", ""), "\n" * piece.count("\n")
    return f'{before}<span class="{classes}" title="{title}">{shown}{mark}</span>{behind}'


def _inline(piece: str) -> str:
    """As `_visible`, on one line."""
    shown = piece.replace("\n", "↵").replace("\t", "⇥").replace("\r", "↵").strip(" ") or (
        "␣" if piece else "∅"
    )
    return f"<bdi>{text_html(shown)}</bdi>"


def _shade(gain_nats: float) -> str:
    steps = int(np.searchsorted(SHADES_NATS, gain_nats, side="right"))
    return f"s{steps}" if steps else ""


def _about_target(result: InfluentialTokens, row: int) -> str:
    targets = result.targets
    return (
        f"token {targets.position[row]:,}, {escape(str(targets.kind[row]))}: "
        f"L_short {number(float(targets.loss_short_nats[row]))}, L_long {number(float(targets.loss_long_nats[row]))}, "
        f"gain {number(float(result.gain_nats[row]))} nats"
    )


def _examples(result: InfluentialTokens) -> str:
    if len(result.over) == 0:
        return ""
    selector = default_selector(result.choices)
    order = np.argsort(-result.gain_nats[result.over], kind="stable")[:MOST_EXAMPLES].tolist()
    others = len(result.choices) > 1 or len(result.over) > len(order)
    more = " All targets and selectors: <code>to_pandas()</code>." if others else ""
    shown = "".join(_example(result, selector, n, opened=n == order[0]) for n in order)
    return (
        f"<p><b>What {foreign_html(selector)} chose</b>, for the {len(order)} of these tokens that gain most. Boxes: "
        f'chosen far tokens with their rank, shaded by influence. <span class="short">Dotted</span>: short context. '
        f'<span class="target">&nbsp;Framed&nbsp;</span>: the token to predict.{more}</p>{shown}'
    )


def _example(result: InfluentialTokens, selector: str, index: int, *, opened: bool) -> str:
    """One target over tau, the ``index``-th: far contexts side by side, and a table of what was chosen."""
    row = int(result.over[index])
    position = int(result.targets.position[row])
    far_end = position - result.n_short
    end = _spans([("short", "", "".join(result.pieces[far_end:position]))])
    end += _boxed(result.pieces[position], "target", "", "the token to predict")
    far = result.pieces[position - result.n_long : far_end]
    found = result.choices[selector]
    columns = _far_text("Its own far context", "true", far, found["true"], index, end)
    if "placebo" in found:
        columns += _far_text(
            "Placebo far context", "placebo", result.placebo_pieces[index], found["placebo"], index, end
        )
    return (
        f"<details{' open' if opened else ''}><summary><b>{_inline(result.pieces[position])}</b> — "
        f"{_about_target(result, row)}</summary>"
        f'<div class="pair">{columns}</div>{_choice_table(result, selector, index)}</details>'
    )


def _far_text(head: str, kind: str, far: list[str], choices: Choices, index: int, end: str) -> str:
    """A far context with its chosen tokens, and the short context and target, ``end``, behind it."""
    influence = np.nan_to_num(choices.influence[index])
    largest = max(float(influence.max()), 1e-12)
    rank_of = {int(column): rank for rank, column in enumerate(choices.selected[index])}
    written = []
    for column, piece in enumerate(far):
        if column not in rank_of:
            written.append(text_html(piece))
            continue
        rank = rank_of[column]
        shade = int(np.clip(np.ceil(5 * influence[rank] / largest), 1, 5))
        about = f"influence {influence[rank]:.3g}"
        written.append(_boxed(piece, f"chosen s{shade}", f"<sup>{rank + 1}</sup>", about))
    return (
        f'<div class="far {kind}"><span class="soft">{head}</span>'
        f'<div class="text" tabindex="0" role="region" aria-label="{head}">{"".join(written)}{end}</div></div>'
    )


def _choice_table(result: InfluentialTokens, selector: str, index: int) -> str:
    row = int(result.over[index])
    position = int(result.targets.position[row])
    far = result.pieces[position - result.n_long : position - result.n_short]
    found = result.choices[selector]
    parts = [(found["true"], far)]
    if "placebo" in found:
        parts.append((found["placebo"], result.placebo_pieces[index]))
    unit = influence_unit(selector)
    influence = f"influence [{unit}]" if unit else "influence"
    heads = "".join(
        f'<th scope="col" class="words part">{name}</th><th scope="col">back</th><th scope="col">{influence}</th>'
        '<th scope="col">L<sub>k</sub></th>'
        for name in ("chosen", "chosen in the placebo")[: len(parts)]
    )
    short, long = float(result.targets.loss_short_nats[row]), float(result.targets.loss_long_nats[row])
    first = "".join(f'<td class="part" colspan="3"></td><td>{number(short)}</td>' for _ in parts)
    body = [f'<tr><th scope="row">0</th>{first}</tr>']
    for rank in range(result.k):
        cells = "".join(_choice_cells(result, choices, pieces, index, rank) for choices, pieces in parts)
        body.append(f'<tr><th scope="row">{rank + 1}</th>{cells}</tr>')
    last = f'<td class="part" colspan="3"></td><td>{number(long)}</td>'
    last += '<td class="part" colspan="4"></td>' * (len(parts) - 1)  # not measured
    body.append(f'<tr><th scope="row">all {result.n_long - result.n_short:,}</th>{last}</tr>')
    return (
        '<div class="wide"><table class="numbers"><caption class="soft">L<sub>k</sub> [nats]: loss given the short '
        "context and the first k chosen tokens; k = 0 is L<sub>short</sub>, all are L<sub>long</sub></caption>"
        f'<thead><tr><th scope="col">k</th>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _choice_cells(
    result: InfluentialTokens, choices: Choices, pieces: list[str], index: int, rank: int
) -> str:
    column = int(choices.selected[index, rank])
    return (
        f'<td class="words part">{_inline(pieces[column])}</td><td>{result.n_long - column}</td>'
        f"<td>{number(float(choices.influence[index, rank]), digits=3)}</td>"
        f"<td>{number(float(choices.loss_nats[index, rank]))}</td>"
    )
