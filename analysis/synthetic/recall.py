"""Do selectors find the tokens that an answer depends on, where they are known? (docs/method.md, 2.6)

Of a model trained on a task with planted tokens (docs/method.md, 3.1 and 3.2) the context is the prompt of a test
sample, the target its label. The short context is the last M tokens, and only samples with all of their planted tokens
before it are measured [ours]: then the whole planted set is among the candidates, and the short context says nothing
about the label.

A place of sparse parity is a pair (selector, bit). What is planted is the bit, but the answer depends on both of its
tokens, so place recall counts either. In the task `planted` a place is a token, and there is no place recall.

The placebo [ours] is the far context of another test sample, as long, with as many planted tokens, and *another label*;
the target stays the true one. (With the same label it would be no placebo but a second true context.) Placebo recall is
the recall of the placebo's planted columns: a selector that goes by what a token does for the target has no reason
to put them first; one that goes by how a token looks finds them as often as in the true context.

Recall of a model that is always right need not reach 1: where it reads an absent bit as 0, nothing changes when a
planted 0 is dropped or added. So recall is given by planted symbol, too: of the planted tokens 0 and of those 1.

Shapes: n samples, N long and M short context length, F = N - M far tokens, p planted tokens of each sample, k_max
selected tokens, K values of k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.contexts import Contexts
from analysis.selectors import check_selector
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, wilson
from analysis.stats.show import show
from analysis.synthetic.planted import KS, chance_recall, found_at, selected_columns
from olmo_sparsity.util import arguments
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import provenance
from olmo_sparsity.util.streams import Stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from analysis.model.losses import Scorer
    from olmo_sparsity.tasks.sparse import SparseTask

SELECTORS = ("leave-one-out", "leave-one-in", "greedy", "gradient", "attention", "random", "nearest")
"""Whose recall is measured, where nothing else is said."""
NAME = "recall.json"
_DRAWS_PER_SAMPLE = 64


@dataclass(frozen=True)
class RecallSettings:
    """What is measured; `checked_settings` makes one that fits the task."""

    length: int
    """N: tokens of every prompt."""
    planted: tuple[int, ...]
    """Numbers of planted tokens, p: a cell for each."""
    n_short: int
    """M, whole places."""
    samples: int
    """n, of each cell."""
    selectors: tuple[str, ...]
    seed: int
    """Of the samples, their placebos, selectors that draw, and the bootstrap."""

    @property
    def n_far(self) -> int:
        """F."""
        return self.length - self.n_short

    @property
    def ks(self) -> tuple[int, ...]:
        """`KS`, as far as there are so many far tokens."""
        return tuple(k for k in KS if k <= self.n_far)


@dataclass(frozen=True)
class PlantedSamples:
    """The samples of a cell with their placebos."""

    contexts: Contexts
    """n prompts with their labels as targets; target_id is the index of the sample."""
    planted: np.ndarray
    """(n, p) columns of the far context."""
    donors: np.ndarray
    """(n,) row of the sample whose far context is the placebo; its label is another one."""
    drawn: int
    """How many samples were drawn to find n with all planted tokens in the far context."""

    @property
    def placebos(self) -> Contexts:
        """The same targets and short contexts behind the far contexts of the donors."""
        return self.contexts.with_far(self.contexts.tokens[self.donors, : self.contexts.n_far])


def checked_settings(
    task: SparseTask,
    *,
    length: int | None = None,
    planted: Sequence[int] | None = None,
    n_short: int = 2,
    samples: int = 100,
    selectors: Sequence[str] = SELECTORS,
    seed: int = 0,
) -> RecallSettings:
    """Settings that fit the task: by default N of the longest training prompt, and those of `KS` as p that training had
    and the far context holds.

    Raises `UserError` for a length that does not hold a p, an M without far tokens or with part of a place, and
    selectors that do not exist or screen too few tokens.
    """
    length, unit = length or task.train_length[1], task.tokens_per_place
    if not 0 < n_short < length or n_short % unit:
        raise UserError(
            f"--n-short {n_short} must be a multiple of {unit} (the tokens of one place of {task.name}), above 0 and "
            f"below --length {length}"
        )
    if planted is None:
        planted = [p for p in KS if p in task.ks("train") and p * unit <= length - n_short]
    settings = RecallSettings(length, tuple(planted), n_short, samples, tuple(selectors), seed)
    for p in planted:
        task.at_length(length, p)
    for name in selectors:
        check_selector(name, k_max=max(settings.ks), n_far=settings.n_far)
    return settings


def draw_samples(task: SparseTask, settings: RecallSettings, planted: int) -> PlantedSamples:
    """The first n test samples with p planted tokens, all of them in the far context, and a placebo for each.

    The donor of a placebo is drawn uniformly among those of the n samples that have another label. A pure function of
    the settings. Raises `UserError` where such samples are too rare, or all have the same label.
    """
    sized = task.at_length(settings.length, planted)
    kept = np.empty(0, dtype=np.int64)
    for first in range(0, _DRAWS_PER_SAMPLE * settings.samples, settings.samples):
        indices = np.arange(first, first + settings.samples)
        columns = sized.sample("test", settings.seed, indices).planted
        assert columns is not None
        kept = np.append(kept, indices[columns.max(axis=1) < settings.n_far])
        if len(kept) >= settings.samples:
            break
    else:
        raise UserError(
            f"{task.name}: of {_DRAWS_PER_SAMPLE * settings.samples:,} samples of length {settings.length} with "
            f"{planted} planted tokens only {len(kept):,} have none among the last {settings.n_short}; lower --ks or "
            "--n-short, or raise --length (stretched planted positions need a locality)"
        )
    kept = kept[: settings.samples]
    batch = sized.sample("test", settings.seed, kept)
    assert batch.planted is not None and batch.label is not None
    labels = batch.label
    if (labels == labels[0]).all():
        raise UserError(
            f"all {len(labels)} samples have the same label, so that none is a placebo for another; raise --samples"
        )
    generator = np.random.default_rng([Stream.PLANTED_PLACEBOS, settings.seed])
    donors = np.array([generator.choice(np.flatnonzero(labels != label)) for label in labels])
    contexts = Contexts(batch.tokens[:, : settings.length], labels[:, None], kept[:, None], settings.n_short)
    return PlantedSamples(contexts, batch.planted, donors, int(kept[-1]) + 1)


def measure_recall(
    scorer: Scorer,
    task: SparseTask,
    settings: RecallSettings,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tidy frames: accuracy of the model (a row per p), and recall of every selector.

        accuracy   planted (p), samples, samples_drawn, value, low, high
        recalls    planted, selector, k, name, value, low, high

    ``name``: token_recall, place_recall (of tasks with places), each also with _right behind it (over samples that are
    answered right) and _of_SYMBOL (share of all such planted tokens), and token_placebo_recall, place_placebo_recall.
    ``advance`` is called with the number of contexts that a selector has finished, true and placebo.
    """
    accuracy, recalls = [], []
    for samples in [draw_samples(task, settings, planted) for planted in settings.planted]:
        contexts, planted = samples.contexts, samples.planted.shape[1]
        right = scorer.measures(contexts, contexts.all_far, ("correct",))[:, 0, 0] == 1
        counts = {"planted": planted, "samples": len(right), "samples_drawn": samples.drawn}
        accuracy.append({**counts, **vars(wilson(int(right.sum()), len(right)))})
        for name in settings.selectors:
            true, placebo = (
                selected_columns(name, scorer, some, settings.seed, max(settings.ks), advance)
                for some in (contexts, samples.placebos)
            )
            rows = _recalls(samples, true, placebo, right, task, settings)
            recalls += [{"planted": planted, "selector": name, **row} for row in rows]
    return pd.DataFrame(accuracy), pd.DataFrame(recalls)


def _recalls(
    samples: PlantedSamples,
    true: np.ndarray,
    placebo: np.ndarray,
    right: np.ndarray,
    task: SparseTask,
    settings: RecallSettings,
) -> Iterator[dict[str, Any]]:
    """Rows k, name, value, low, high of what was selected (n, k_max) in true and placebo contexts.

    ``right``: (n,) bool, samples that the model answers correctly. Recalls are means over samples, but those of one
    symbol are shares of all such planted tokens.
    """
    ks, everyone = settings.ks, np.ones(len(right))
    symbols = np.take_along_axis(samples.contexts.tokens, samples.planted, axis=1)
    ratios: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # numerators (n, K) over denominators (n,)
    for what, unit in countings(task).items():
        is_found = found_at(true, samples.planted, ks, unit)
        recall = is_found.mean(axis=2)
        placebo_recall = found_at(placebo, samples.planted[samples.donors], ks, unit).mean(axis=2)
        ratios[f"{what}_recall"] = recall, everyone
        ratios[f"{what}_recall_right"] = recall * right[:, None], right
        ratios[f"{what}_placebo_recall"] = placebo_recall, everyone
        for symbol in np.unique(symbols):
            of_symbol = symbols == symbol
            name = f"{what}_recall_of_{task.vocabulary[symbol]}"
            ratios[name] = (is_found & of_symbol[:, None]).sum(axis=2), of_symbol.sum(axis=1)
    bootstrap = ClusterBootstrap(np.arange(len(right)), seed=settings.seed)
    for column, k in enumerate(ks):
        for name, (above, below) in ratios.items():
            yield {"k": k, "name": name, **vars(bootstrap.ratio_interval(above[:, column], below))}


def countings(task: SparseTask) -> dict[str, int]:
    """How planted tokens are counted, and the tokens of a place in each."""
    unit = task.tokens_per_place
    return {"token": 1} if unit == 1 else {"token": 1, "place": unit}


def recall_of_checkpoint(checkpoint: str, *, device: str | None = None, **options: Any) -> dict[str, Any]:
    """Measure a model that was trained on a task with planted tokens: what `recall.json` says.

    ``options`` are those of `checked_settings`, and errors too. Raises `UserError` also where the task plants nothing.
    """
    from analysis.model.loading import open_model
    from analysis.model.losses import Scorer
    from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
    from olmo_sparsity.data.task_batches import task_of
    from olmo_sparsity.tasks.sparse import SparseTask
    from olmo_sparsity.util.provenance import pick_device

    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    task = None if config.task.name is None else task_of(config)
    if not isinstance(task, SparseTask):
        raise UserError(
            f"{folder} was trained on {config.task.name or 'text'}, which has no planted tokens; give a run on "
            "sparse_parity or planted"
        )
    settings, place = checked_settings(task, **options), pick_device(device)
    loaded = open_model(str(folder))
    loaded.check_context(settings.length)
    scorer = Scorer(loaded.model.to(place), device=place)
    contexts = 2 * settings.samples * len(settings.selectors) * len(settings.planted)
    with progress("recall", contexts, "contexts") as advance:
        accuracy, recalls = measure_recall(scorer, task, settings, advance=advance)
    recalls = recalls.astype(object).where(recalls.notna(), None)
    return {
        "run": folder.resolve().parent.name,
        "checkpoint": str(folder),
        "step": load_state(folder).step,
        "weights_sha256": loaded.sha256,
        "training_seed": loaded.training_seed,
        "task": {"name": task.name, "parameters": asdict(task)},
        "scheme": config.positions.scheme,
        "family": config.model.family,
        "settings": {**asdict(settings), "ks": settings.ks, "resamples": DEFAULT_RESAMPLES},
        "chance": {
            what: {str(k): chance_recall(k, settings.n_far, tokens) for k in settings.ks}
            for what, tokens in countings(task).items()
        },
        "accuracy": accuracy.to_dict("records"),
        "recalls": recalls.to_dict("records"),
        "provenance": provenance(),
    }


# --- the figure ---

_COUNTINGS = {"token": "planted tokens", "place": "planted pairs, by either token"}
_CHANCE: dict[str, Any] = {"color": "0.3", "linewidth": 1, "linestyle": ":", "zorder": 1.6}
_MOST: dict[str, Any] = {"color": "0.75", "linewidth": 2.2, "zorder": 1.5}


def recall_figure(result: Mapping[str, Any]) -> Figure:
    """Recall against k of a `recall.json`: a panel for each number p of planted tokens, and for each way of counting.

    A curve per selector: true far contexts solid, placebos dashed, chance dotted, and in grey the most that k tokens
    can find. Bars: 95 % intervals.
    """
    import matplotlib
    from matplotlib.lines import Line2D

    from analysis.figures import style

    recalls, accuracy = pd.DataFrame(result["recalls"]), result["accuracy"]
    settings, styles = result["settings"], style.selector_styles(result["settings"]["selectors"])
    block = style.in_rows(len(accuracy), style.columns_in(style.PAGE, 2.0))
    rows = 1 + block[-1][0]
    places = [
        (row + rows * number, column) for number in range(len(result["chance"])) for row, column in block
    ]
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places)
        for number, (what, chance) in enumerate(result["chance"].items()):
            block_panels = panels[number * len(accuracy) : (number + 1) * len(accuracy)]
            for axes, cell in zip(block_panels, accuracy, strict=True):
                ks = settings["ks"]
                axes.plot(ks, list(chance.values()), label="chance", **_CHANCE)
                axes.plot(ks, [min(k, cell["planted"]) / cell["planted"] for k in ks], label="most", **_MOST)
                of_cell = recalls[recalls["planted"] == cell["planted"]]
                for name, is_placebo in ((f"{what}_placebo_recall", True), (f"{what}_recall", False)):
                    _draw_curves(axes, of_cell[of_cell["name"] == name], styles, placebo=is_placebo)
                axes.set_title(f"p = {cell['planted']} (accuracy {100 * cell['value']:.0f} %)", loc="left")
                style.k_axis(axes, ks)
            style.outer_labels(
                block_panels, "k [selected far tokens]", f"recall [share of\n{_COUNTINGS[what]}]"
            )
        panels[0].set_ylim(-0.04, 1.04)
        lines = [
            Line2D([], [], label="chance", **_CHANCE),
            Line2D([], [], label="the most that k tokens can find", **_MOST),
        ]
        style.add_legend(figure, [*style.selector_handles(styles), *lines])
        style.add_heading(
            figure,
            f"{result['run']}, step {result['step']:,}: {result['task']['name']}, N = {settings['length']}, "
            f"M = {settings['n_short']}; {settings['samples']:,} samples a panel, planted tokens all far; "
            "placebo: far context of a sample with another label, recall of its own planted tokens; "
            "bars: 95 % bootstrap by sample",
        )
    return figure


def _draw_curves(axes: Axes, recalls: pd.DataFrame, styles: Mapping[str, Any], *, placebo: bool) -> None:
    """A curve per selector. Intervals are bars, set a little apart so that none hides another."""
    from analysis.figures import style

    for number, (name, rows) in enumerate(recalls.groupby("selector", sort=False)):
        x = rows["k"].to_numpy() * 2 ** (0.06 * (number - (recalls["selector"].nunique() - 1) / 2))
        value, low, high = (rows[bound].to_numpy(float) for bound in ("value", "low", "high"))
        colour, marker, line = styles[name]
        looks = style.placebo_looks(marker) if placebo else {"linestyle": line, "marker": marker}
        label = f"{name} {rows['name'].iloc[0]}"
        axes.plot(x, value, color=colour, label=label, zorder=2.5 if placebo else 3.0, **looks)
        bars: dict[str, Any] = {"elinewidth": 0.8, "alpha": 0.45 if placebo else 0.85, "zorder": 2.2}
        # a percentile interval need not hold its value; a bar cannot be negative
        lengths = np.maximum([value - low, high - value], 0.0)
        axes.errorbar(x, value, lengths, fmt="none", ecolor=colour, **bars)


# --- the command ---


def parser() -> arguments.Parser:
    """Of `recall`."""
    parser = arguments.Parser(
        prog="olmo-sparsity recall",
        description="""Recall of planted tokens against k: do selectors find what a prediction depends on?

examples:
  olmo-sparsity recall --checkpoint runs/planted --out runs/planted/recall
  olmo-sparsity recall --checkpoint runs/parity --length 50 --ks 1,2,4 --samples 200 --out runs/parity/recall

Of a run or checkpoint trained on sparse_parity or planted. The context is the prompt of a test sample, the target its
label, the placebo the far context of a sample with another label. Measured are samples whose planted tokens all stand
before the last --n-short tokens. Writes recall.json and the figure recall.png. How to read them:
docs/method.md, 2.6.""",
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="RUN", help="a run (then its last checkpoint), or one"
    )
    parser.add_argument(
        "--out", type=arguments.out_folder, required=True, metavar="DIR", help="where to write"
    )
    parser.add_argument(
        "--length", type=arguments.whole_number, help="N (default: the longest prompt of training)"
    )
    parser.add_argument(
        "--n-short", type=arguments.whole_number, default=2, help="M in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--ks",
        dest="planted",
        type=arguments.whole_numbers,
        help="numbers of planted tokens of a sample (default: powers of 2 up to training's k_train)",
    )
    parser.add_argument(
        "--samples", type=arguments.whole_number, default=100, help="for each of --ks (default: %(default)s)"
    )
    parser.add_argument(
        "--selectors", type=arguments.texts, default=SELECTORS, help=f"default: {','.join(SELECTORS)}"
    )
    parser.add_argument(
        "--seed", type=arguments.seed_number, default=0, help="of the samples and the bootstrap (default: 0)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    return parser


def main() -> None:
    """Measure, write and print."""
    from analysis.figures.style import save_figure

    options = vars(parser().parse_args())
    out = options.pop("out")
    result = recall_of_checkpoint(options.pop("checkpoint"), **options)
    write_json(out / NAME, result)
    save_figure(recall_figure(result), out, "recall")
    accuracy, recalls = pd.DataFrame(result["accuracy"]), pd.DataFrame(result["recalls"])
    print(show(accuracy, title="samples that are answered right [%]"))
    for what, chance in result["chance"].items():
        shown = recalls[recalls["name"].isin([f"{what}_{kind}" for kind in _SHOWN])]
        table = shown.pivot_table("value", ["planted", "selector", "name"], "k", sort=False)
        print(f"\nrecall of the {_COUNTINGS[what]}\n{table.to_string(float_format='{:.2f}'.format)}")
        print(f"chance: {', '.join(f'{share:.2f}' for share in chance.values())}")
    print(f"\nwrote {NAME}, recall.png to {out}")


_SHOWN = ("recall", "placebo_recall", "recall_right")
