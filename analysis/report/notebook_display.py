"""The display of an `InfluentialTokens` in Jupyter: self-contained HTML without scripts, every text escaped.

It sets no background and no text colour of its own. Both are those of the notebook, light or dark, and what is
emphasised is a translucent shade over them. What a shade says is also said by a line, a box or a number.
Shapes: N long and M short context length, F = N - M far tokens, k selected tokens.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

import numpy as np

from analysis.report.foreign_text import foreign_html, text_html
from analysis.report.notebook_result import Choices, InfluentialTokens
from analysis.report.words import influence_unit, number, plural
from analysis.stats.recovery import default_selector, nats

SHADES_NATS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""From these gains on a token is shaded, the more strongly the larger."""
MOST_TOKENS = 4000
"""Tokens of the text that are shown."""
MOST_EXAMPLES = 6
"""Targets whose chosen tokens are shown."""

_CSS = """
.olmo-influence { line-height: 1.55; max-width: 75rem; unicode-bidi: isolate; }
.olmo-influence p, .olmo-influence details { margin: 0.5em 0; }
.olmo-influence .soft { opacity: 0.78; font-size: 0.92em; }
.olmo-influence .text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; text-align: start;
  max-height: 22em; overflow-y: auto; border: 1px solid rgba(128,128,128,0.55); border-radius: 6px;
  padding: 0.6em 0.8em; margin: 0.3em 0; }
.olmo-influence .far .text { max-height: 16em; }
.olmo-influence .placebo .text { border-style: dashed; }
.olmo-influence .s1 { background: rgba(230,159,0,0.13); } .olmo-influence .s2 { background: rgba(230,159,0,0.23); }
.olmo-influence .s3 { background: rgba(230,159,0,0.34); } .olmo-influence .s4 { background: rgba(230,159,0,0.45); }
.olmo-influence .s5 { background: rgba(230,159,0,0.58); }
.olmo-influence .over { border-bottom: 2px solid currentColor; }
.olmo-influence .sign { font-size: 0.72em; border: 1px dotted currentColor; padding: 0 0.15em; white-space: nowrap; }
.olmo-influence .unmeasured { opacity: 0.7; }
.olmo-influence .chosen { outline: 1.5px solid currentColor; border-radius: 2px; font-weight: 600; margin: 0 2px;
  padding: 0 1px; }
.olmo-influence .chosen sup { font-size: 0.75em; line-height: 0; vertical-align: 0.4em; padding-left: 0.15em; }
.olmo-influence .short { border-bottom: 1px dotted currentColor; background: rgba(86,180,233,0.16); }
.olmo-influence .target { outline: 2px solid currentColor; outline-offset: 1px; font-weight: 700; margin: 0 2px;
  background: rgba(86,180,233,0.4); }
.olmo-influence .pair { display: flex; flex-wrap: wrap; gap: 0.4em 1em; }
.olmo-influence .far { flex: 1 1 22em; min-width: 0; }
.olmo-influence summary { cursor: pointer; padding: 0.15em 0; }
.olmo-influence .wide { overflow-x: auto; }
.olmo-influence table.numbers { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.5em 0; }
.olmo-influence table.numbers caption { text-align: left; caption-side: top; padding: 0.2em 0;
  color: inherit; white-space: nowrap; }
.olmo-influence table.numbers :is(th, td) { text-align: right; padding: 0.1em 0.8em;
  background: none; border: none; white-space: pre; font-weight: 400; }
.olmo-influence table.numbers .strong > * { font-weight: 700; }
.olmo-influence table.numbers thead tr:last-child > * { border-bottom: 1px solid currentColor; }
.olmo-influence table.numbers .words { text-align: left; }
.olmo-influence table.numbers .part { border-left: 1px solid rgba(128,128,128,0.55); }
"""


def page(result: InfluentialTokens) -> str:
    """The text shaded by gain, recovery by selector and k, and what was chosen for the targets that gain most."""
    # the last two classes keep MathJax from reading dollar signs as formulas
    return (
        f'<div class="olmo-influence tex2jax_ignore mathjax_ignore"><style>{_CSS}</style>'
        f"{_heading(result)}{_recovery_table(result)}{_text(result)}{_examples(result)}</div>"
    )


def _heading(result: InfluentialTokens) -> str:
    over, count = len(result.over), len(result.targets)
    most = (
        "" if over else f" The most is {number(float(result.gain_nats.max()))}: lower <code>tau_nats</code>."
    )
    return (
        f"<p><b>{over:,} of {count:,} {plural(count, 'token')}</b> ({number(over / count, scale=100, digits=1)} %) "
        f"{'is' if over == 1 else 'are'} predicted better by more than {nats(result.tau_nats)} from the "
        f"{result.n_long:,} tokens before (N) than from the last {result.n_short:,} of them (M).{most}</p>"
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
    over = set(result.over.tolist())
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
