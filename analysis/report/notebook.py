"""What `analysis.notebook` measured on one text: numbers, tables, a figure, and a display for Jupyter. Needs no torch.

The display is self-contained HTML without scripts, every text escaped. It sets no background and no text colour of its
own: both are those of the notebook, light or dark, and what is emphasised is a translucent shade over them. What a
shade says is also said by a line, a box or a number.

Shapes: T tokens of the text, n targets, m of them over tau, N long and M short context length, F = N - M far tokens, k
selected tokens. Losses are in nats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from analysis.records.results import INFLUENTIAL_TOKENS
from analysis.records.schema import Targets
from analysis.report.foreign_text import page_environment, source_of, text_html
from analysis.report.words import influence_unit, number
from analysis.stats.recovery import and_prefix, default_selector, nats, without_placebo
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import file_in, write_text
from olmo_sparsity.util.result_files import Json

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

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
    targets_per_block: int
    tau_nats: float
    k: int
    prefix: tuple[int, ...] = ()
    """Token ids that stand before every context (docs/method.md, 2.1 [ours])."""

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
        """Number and share over tau, share below -tau; by selector and k: recovery, its placebo, net recovery.

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
            "share_under_minus_tau": float((self.gain_nats < -self.tau_nats).mean()),
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
        if gain == 0:
            return found
        short = self.targets.loss_short_nats[over]
        for far_context, key in (("true", "recovery"), ("placebo", "placebo_recovery")):
            if far_context in self.choices[selector]:
                loss = self.choices[selector][far_context].loss_nats[:, k - 1]
                found[key] = float((short - loss).sum()) / gain
        if found["placebo_recovery"] is not None:
            found["net_recovery"] = float(without_placebo(found["recovery"], found["placebo_recovery"]))
        return found

    def targets_frame(self) -> pandas.DataFrame:
        """A row per target, over tau or not, with `TARGET_COLUMNS` and ``over_tau``."""
        import pandas

        found = self.targets
        columns = {
            "position": found.position,
            "token": [self.pieces[at] for at in found.position],
            "kind": found.kind,
            "loss_short_nats": found.loss_short_nats,
            "loss_long_nats": found.loss_long_nats,
            "gain_nats": self.gain_nats,
            "over_tau": self.gain_nats > self.tau_nats,
        }
        return pandas.DataFrame(columns)

    def to_pandas(self) -> pandas.DataFrame:
        """A row per target over tau, selector and k.

        Columns: `TARGET_COLUMNS`; ``selector``; ``k``, the rank of the chosen token; ``selected_position`` in the text
        and ``selected_token``, its text; ``distance_tokens`` back from the target; ``influence`` in the selector's
        unit; ``loss_k_nats``, L_k of the first k tokens together; ``placebo_selected_token``, ``placebo_influence``
        and ``placebo_loss_k_nats`` for the placebo far context, missing where there is none.
        """
        import pandas

        targets = self.targets_frame().iloc[self.over].drop(columns="over_tau")
        tables = []
        for selector, by_far in self.choices.items():
            true, position = by_far["true"], self._positions(selector)
            columns: Json = {
                "selector": selector,
                "k": np.tile(np.arange(1, self.k + 1), len(targets)),
                "selected_position": position.ravel(),
                "selected_token": [self.pieces[at] for at in position.ravel()],
                "distance_tokens": (self.targets.position[self.over][:, None] - position).ravel(),
                "influence": true.influence.ravel(),
                "loss_k_nats": true.loss_nats.ravel(),
                **dict.fromkeys(("placebo_selected_token", "placebo_influence", "placebo_loss_k_nats")),
            }
            if placebo := by_far.get("placebo"):
                chosen = zip(
                    self.placebo_pieces, placebo.selected, strict=False
                )  # an interrupt leaves some out
                columns["placebo_selected_token"] = [pieces[at] for pieces, row in chosen for at in row]
                columns["placebo_influence"] = placebo.influence.ravel()
                columns["placebo_loss_k_nats"] = placebo.loss_nats.ravel()
            tables.append(targets.loc[targets.index.repeat(self.k)].assign(**columns))
        return pandas.concat(tables).sort_index(kind="stable").reset_index(drop=True)

    def top_k(self, k: int = 3, selector: str | None = None) -> pandas.DataFrame:
        """A row per target over tau, the one that gains most first: `TARGET_COLUMNS`, the text of its first k chosen
        tokens, ``chosen``, and L_k of them, ``loss_k_nats``; by default of the selector that others are compared with.
        """
        if not 1 <= k <= self.k:
            raise UserError(f"k = {k} was not measured; give 1 to {self.k}")
        name = self._measured(selector)
        frame = self.targets_frame().iloc[self.over].drop(columns="over_tau")
        frame["chosen"] = [[self.pieces[at] for at in row] for row in self._positions(name)[:, :k]]
        frame["loss_k_nats"] = self.choices[name]["true"].loss_nats[:, k - 1]
        return frame.sort_values("gain_nats", ascending=False, ignore_index=True)

    def _measured(self, selector: str | None) -> str:
        name = selector or default_selector(self.choices)
        if name not in self.choices:
            raise UserError(f"{name} was not measured; choose {', '.join(self.choices)}")
        return name

    def _positions(self, selector: str) -> np.ndarray:
        """Places in the text of the tokens that a selector chose for the targets over tau, (m, k)."""
        return self.far_starts[:, None] + self.choices[selector]["true"].selected

    @property
    def far_starts(self) -> np.ndarray:
        """Places in the text where the far contexts of the targets over tau begin, (m,)."""
        place_in_block = self.targets.target_id[self.over] % self.targets_per_block
        return self.targets.position[self.over] - self.n_long - place_in_block

    def aggregate(self, unit: str, selector: str | None = None) -> pandas.DataFrame:
        """A row per ``word`` or ``sentence`` of the text, see `UNITS`; a token belongs to the one that it begins in.

        Columns: ``text``; ``first_position`` and ``last_position`` of its tokens; ``targets`` measured in it and their
        ``gain_nats`` together; ``times_chosen``, how often its tokens are among the k chosen ones of a target, and
        their ``influence`` together, of one selector as in `top_k`.
        """
        import pandas

        if unit not in UNITS:
            raise UserError(f"{unit} is no unit; choose {', '.join(UNITS)}")
        text = "".join(self.pieces)
        spans = [match.span() for match in re.finditer(UNITS[unit], text, re.DOTALL)] or [(0, len(text))]
        starts = np.array(list(accumulate(map(len, self.pieces), initial=0))[:-1])
        spaces = np.array([len(piece) - len(piece.lstrip()) if piece.strip() else 0 for piece in self.pieces])
        place = np.searchsorted([start for start, _ in spans], starts + spaces, side="right") - 1
        unit_of = np.maximum(place, 0)
        name = self._measured(selector)
        found, chosen = self.choices[name]["true"], self._positions(name)
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

        styles = selector_styles(self.choices)
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
            write_text(path, html)
        return html

    def save(self, path: str | Path) -> Path:
        """Write the result as JSON and return its path; into a folder, as ``influential_tokens.json``."""
        path = file_in(path, INFLUENTIAL_TOKENS.name)
        columns = {name: column.tolist() for name, column in vars(self.targets).items() if column is not None}
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

    def __repr__(self) -> str:
        """One line: how many targets are over tau, and what k tokens bring back."""
        over_tau = len(self.targets.over(self.tau_nats))
        head = (
            f"InfluentialTokens: {over_tau:,} of {len(self.targets):,} targets gain more than "
            f"{nats(self.tau_nats)}, {(self.gain_nats < -self.tau_nats).sum():,} lose more "
            f"(N = {self.n_long}, M = {self.n_short}"
            + (f", B = {self.targets_per_block}" if self.targets_per_block > 1 else "")
            + f"{and_prefix(self.prefix)})"
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
    environment = page_environment()
    selector, over = default_selector(result.choices), result.over
    order = np.argsort(-result.gain_nats[over], kind="stable")[:MOST_EXAMPLES].tolist()
    return environment.get_template("notebook.html").render(
        css=Markup(source_of(environment, "notebook.css")),
        result=result,
        over=len(result.targets.over(result.tau_nats)),
        tau=nats(result.tau_nats),
        ks=[*(2**power for power in range(result.k.bit_length()) if 2**power < result.k), result.k],
        shades=SHADES_NATS,
        most=MOST_TOKENS,
        text=_text(result),
        selector=selector,
        unit=influence_unit(selector),
        examples=[_example(result, selector, index) for index in order],
        more=len(result.choices) > 1 or len(over) > len(order),
    )


def _text(result: InfluentialTokens) -> Markup:
    """The text, every target shaded by its gain and underlined where it is over tau."""
    row_of_position = {int(position): row for row, position in enumerate(result.targets.position)}
    over = set(result.targets.over(result.tau_nats).tolist())
    unmeasured = "unmeasured" if result.targets.position[0] else ""
    written = Markup()
    for position, piece in enumerate(result.pieces[:MOST_TOKENS]):
        row = row_of_position.get(position)
        if row is None:
            written += _span(unmeasured, piece) if unmeasured else Markup(text_html(piece))
            continue
        steps = int(np.searchsorted(SHADES_NATS, result.gain_nats[row], side="right"))
        classes = " ".join([f"s{steps}"] * (steps > 0) + ["over"] * (row in over))
        written += (
            _span(classes, _visible(piece), _about(result, row)) if classes else Markup(text_html(piece))
        )
    return written


def _span(classes: str, piece: str, title: str = "", mark: str = "") -> Markup:
    """A piece of text that is emphasised, with a mark at its end."""
    tip = Markup(' title="{}"').format(title) if title else ""
    return Markup('<span class="{}"{}>{}{}</span>').format(classes, tip, Markup(text_html(piece)), mark)


def _visible(piece: str) -> str:
    """A token that is pointed at; line breaks, a single space and a part of a character are shown by signs."""
    if not piece or piece.isspace():
        piece = piece.replace("\n", "↵\n").replace(" ", "␣").replace("\t", "⇥") or "∅"
    return piece


def _boxed(piece: str, classes: str, title: str, mark: str = "") -> Markup:
    """A token in a box; the space before a word and line breaks are not part of the box."""
    if piece.strip():
        word = piece.lstrip(" ")
        return Markup(piece[: len(piece) - len(word)]) + _span(classes, word, title, mark)
    return _span(classes, _visible(piece).replace("\n", ""), title, mark) + Markup("\n" * piece.count("\n"))


def _inline(piece: str) -> str:
    """As `_visible`, on one line."""
    shown = piece.replace("\n", "↵").replace("\t", "⇥").replace("\r", "↵").strip(" ")
    return shown or ("␣" if piece else "∅")


def _about(result: InfluentialTokens, row: int) -> str:
    targets = result.targets
    return (
        f"token {targets.position[row]:,}, {targets.kind[row]}: "
        f"L_short {number(float(targets.loss_short_nats[row]))}, L_long {number(float(targets.loss_long_nats[row]))}, "
        f"gain {number(float(result.gain_nats[row]))} nats"
    )


def _example(result: InfluentialTokens, selector: str, index: int) -> Json:
    """What the template shows of one target over tau, the ``index``-th; a side for each far context."""
    row = int(result.over[index])
    position = int(result.targets.position[row])
    window = result.pieces[result.far_starts[index] : position]
    n_far = result.n_long - result.n_short
    end = _span("short", "".join(window[n_far:]))
    end += _boxed(result.pieces[position], "target", "the token to predict")
    pieces_of = {"true": window[:n_far]}
    if "placebo" in result.choices[selector]:
        pieces_of["placebo"] = result.placebo_pieces[index]
    sides = []
    for far_context, pieces in pieces_of.items():
        choices = result.choices[selector][far_context]
        chosen = choices.selected[index].tolist()
        tokens = zip(chosen, choices.influence[index], choices.loss_nats[index], strict=True)
        sides.append(
            {
                "kind": far_context,
                "text": _far_text(pieces, chosen, np.nan_to_num(choices.influence[index])) + end,
                "rows": [(_inline(pieces[at]), len(window) - at, inf, loss) for at, inf, loss in tokens],
            }
        )
    return {
        "token": _inline(result.pieces[position]),
        "about": _about(result, row),
        "short": result.targets.loss_short_nats[row],
        "long": result.targets.loss_long_nats[row],
        "sides": sides,
    }


def _far_text(far: list[str], chosen: list[int], influence: np.ndarray) -> Markup:
    """A far context with its chosen tokens, shaded by their influence."""
    largest = max(float(influence.max()), 1e-12)
    written = Markup()
    for column, piece in enumerate(far):
        if column not in chosen:
            written += Markup(text_html(piece))
            continue
        rank = chosen.index(column)
        shade = int(np.clip(np.ceil(5 * influence[rank] / largest), 1, 5))
        mark = Markup("<sup>{}</sup>").format(rank + 1)
        written += _boxed(piece, f"chosen s{shade}", f"influence {influence[rank]:.3g}", mark)
    return written
