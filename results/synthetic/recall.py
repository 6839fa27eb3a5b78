"""Recall of planted tokens: do selectors find what a prediction is known to depend on? (docs/method.md, 2.6)

    python results/synthetic/recall.py --checkpoint runs/planted --out runs/planted/recall
    python results/synthetic/recall.py --checkpoint runs/parity --length 50 --ks 1,2,4 --samples 200 --out runs/recall

Of a model trained on sparse_parity or planted, the context is the prompt of a test sample with all of its planted
tokens before the last M ones, the target its label, and the placebo the far context of a sample with another label.
Writes recall.json, and prints tables.

Recall at k is the share of the p planted columns among the first k selected; chance is k / F.

Shapes: n samples, N long and M short context length, F = N - M far tokens, p planted tokens of each sample, k_max
selected tokens, K values of k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import Contexts
from analysis.model.losses import Scorer
from analysis.open_model import open_model
from analysis.selectors import SelectorInput, SelectorName, find_selector
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, wilson
from analysis.stats.tables import show
from olmo_sparsity.checkpoint import config_of, load_state, resolve_checkpoint
from olmo_sparsity.cli import run_script
from olmo_sparsity.data.build import task_of
from olmo_sparsity.tasks.planted import SparseTask
from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_folder,
    settings_from,
    whole_number_or_zero,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import Advance, progress
from olmo_sparsity.util.provenance import provenance
from olmo_sparsity.util.rng import Stream

SELECTORS = ("leave-one-out", "leave-one-in", "greedy", "gradient", "attention", "random", "nearest")
KS = (1, 2, 4, 8, 16)
"""Numbers of selected tokens for which recall is given."""
_DRAWS_PER_SAMPLE = 64
_SUBSET_ELEMENTS = 1 << 22  # columns of all subsets of one call: 32 MiB of int64


@dataclass(frozen=True)
class RecallSettings:
    """What is measured; `for_task` fills in what depends on the task."""

    length: int = field(default=0, metadata=argument("N (default: the longest prompt of training)"))
    planted: tuple[int, ...] = field(
        default=(),
        metadata=argument("p, a cell for each (default: powers of 2 up to training's k_train)", name="ks"),
    )
    n_short: int = field(default=2, metadata=argument("M in tokens, whole places"))
    samples: int = field(default=100, metadata=argument("n, for each of --ks"))
    selectors: tuple[str, ...] = field(default=SELECTORS, metadata=argument("comma-separated"))
    seed: int = field(
        default=0,
        metadata=argument(
            "of samples, placebos, selectors that draw, and the bootstrap", type=whole_number_or_zero
        ),
    )

    @property
    def n_far(self) -> int:
        """F."""
        return self.length - self.n_short

    @property
    def ks(self) -> tuple[int, ...]:
        """`KS`, as far as there are so many far tokens."""
        return tuple(k for k in KS if k <= self.n_far)

    def for_task(self, task: SparseTask) -> RecallSettings:
        """These with N and p of a task: by default those of training, as far as the far context holds them.

        Raises `UserError` for an M without far tokens or with part of a place, and selectors that do not exist or
        screen too few tokens.
        """
        fitted, unit = replace(self, length=self.length or task.train_length[1]), task.tokens_per_position
        if not 0 < self.n_short < fitted.length or self.n_short % unit:
            raise UserError(
                f"--n-short {self.n_short} must be a multiple of {unit} (the tokens of one place of {task.name}), "
                f"above 0 and below --length {fitted.length}"
            )
        in_training = tuple(p for p in KS if p in task.ks("train") and p * unit <= fitted.n_far)
        for name in self.selectors:
            SelectorName.parse(name).check_candidates(k_max=max(fitted.ks), n_far=fitted.n_far)
        return replace(fitted, planted=self.planted or in_training)


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


def draw_samples(task: SparseTask, settings: RecallSettings, planted: int) -> PlantedSamples:
    """The first n test samples with p planted tokens, all of them in the far context, and a placebo for each.

    The donor of a placebo is drawn uniformly among those of the n samples that have another label. A pure function of
    the settings. Raises `UserError` where N does not hold p, such samples are too rare, or all have the same label.
    """
    sized = task.at_length(settings.length, planted)
    kept: list[int] = []
    drawn = 0
    while len(kept) < settings.samples and drawn < _DRAWS_PER_SAMPLE * settings.samples:
        indices = np.arange(drawn, drawn + settings.samples)
        columns = sized.sample("test", settings.seed, indices).planted
        assert columns is not None
        kept += indices[columns.max(axis=1) < settings.n_far].tolist()
        drawn += settings.samples
    if len(kept) < settings.samples:
        raise UserError(
            f"{task.name}: of {drawn:,} samples of length {settings.length} with {planted} planted tokens only "
            f"{len(kept):,} have none among the last {settings.n_short}; lower --ks or --n-short, or raise --length "
            "(stretched planted positions need a locality)"
        )
    indices = np.array(kept[: settings.samples])
    batch = sized.sample("test", settings.seed, indices)
    assert batch.planted is not None and batch.label is not None
    labels = batch.label
    if (labels == labels[0]).all():
        raise UserError(
            "all samples have the same label, so that none is a placebo for another; raise --samples"
        )
    generator = np.random.default_rng([Stream.PLANTED_PLACEBOS, settings.seed])
    donors = np.array([generator.choice(np.flatnonzero(labels != label)) for label in labels])
    tokens = batch.tokens[:, : settings.length]
    contexts = Contexts(tokens, labels[:, None], indices[:, None], settings.n_short)
    return PlantedSamples(contexts, batch.planted, donors, int(indices[-1]) + 1)


def found_at(selected: np.ndarray, planted: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Whether each planted token (n, p) is among the first k selected (n, k_max), (n, K, p) bool."""
    is_found = selected[:, :, None] == planted[:, None, :]
    return np.stack([is_found[:, :k].any(axis=1) for k in ks], axis=1)


def selected_columns(name: str, scorer: Scorer, contexts: Contexts, seed: int, k_max: int) -> np.ndarray:
    """The far columns that a selector chooses, most influential first, (n, k_max)."""
    size = max(1, _SUBSET_ELEMENTS // (contexts.n_far * contexts.n_long))
    parts = [contexts.take(slice(first, first + size)) for first in range(0, len(contexts), size)]
    select = find_selector(name)
    return np.concatenate([select(SelectorInput(scorer, part, seed, k_max)).columns for part in parts])


def measure_recall(
    scorer: Scorer, task: SparseTask, settings: RecallSettings, advance: Advance = lambda count: None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tidy frames: accuracy of the model (a row per p), and recall of every selector.

        accuracy   planted (p), samples, samples_drawn, value, low, high
        recalls    planted, selector, k, name, value, low, high

    ``name``: token_recall, token_placebo_recall, and token_recall_of_SYMBOL (share of all such planted tokens).
    ``advance`` is called when a selector is done.
    """
    accuracy, recalls = [], []
    for samples in [draw_samples(task, settings, planted) for planted in settings.planted]:
        contexts, planted = samples.contexts, samples.planted.shape[1]
        right = scorer.measures(contexts, contexts.all_far, ("correct",))[:, 0, 0] == 1
        counts = {"planted": planted, "samples": len(right), "samples_drawn": samples.drawn}
        accuracy.append({**counts, **vars(wilson(int(right.sum()), len(right)))})
        bootstrap = ClusterBootstrap(np.arange(len(right)), seed=settings.seed)
        for name in settings.selectors:
            true, placebo = (
                selected_columns(name, scorer, some, settings.seed, max(settings.ks))
                for some in (contexts, samples.placebos)
            )
            advance(1)
            ratios = dict(_ratios(samples, true, placebo, task, settings.ks))
            for column, k in enumerate(settings.ks):
                for of, (above, below) in ratios.items():
                    draws = bootstrap.ratio(above[:, column], below)
                    interval = bootstrap.share(draws, float(below.sum()))
                    which = {"planted": planted, "selector": name, "k": k, "name": of}
                    recalls.append(which | vars(interval))
    return pd.DataFrame(accuracy), pd.DataFrame(recalls)


def _ratios(
    samples: PlantedSamples, true: np.ndarray, placebo: np.ndarray, task: SparseTask, ks: tuple[int, ...]
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """By name, what is summed over samples for each k (n, K), and what the sum is divided by (n,).

    ``true``, ``placebo``: what was selected in either context, (n, k_max).
    """
    everyone = np.ones(len(true))
    is_found = found_at(true, samples.planted, ks)
    yield "token_recall", (is_found.mean(axis=2), everyone)
    of_placebo = found_at(placebo, samples.planted[samples.donors], ks)
    yield "token_placebo_recall", (of_placebo.mean(axis=2), everyone)
    symbols = np.take_along_axis(samples.contexts.tokens, samples.planted, axis=1)
    for symbol in np.unique(symbols):
        alike = symbols == symbol
        found_of_symbol = (is_found & alike[:, None]).sum(axis=2)
        yield f"token_recall_of_{task.vocabulary[symbol]}", (found_of_symbol, alike.sum(axis=1))


def recall_of_checkpoint(checkpoint: str, settings: RecallSettings) -> dict[str, Any]:
    """Measure a model that was trained on a task with planted tokens: what `recall.json` says.

    Raises `UserError` where the task plants nothing, and as `RecallSettings.for_task`.
    """
    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    task = None if config.task.name is None else task_of(config)
    if not isinstance(task, SparseTask):
        raise UserError(
            f"{folder} was trained on {config.task.name or 'text'}, which has no planted tokens; give a run on "
            "sparse_parity or planted"
        )
    settings = settings.for_task(task)
    loaded = open_model(str(folder))
    loaded.check_context(settings.length)
    scorer = Scorer(loaded.model, device=loaded.device)
    with progress("recall", len(settings.selectors) * len(settings.planted), "selections") as advance:
        accuracy, recalls = measure_recall(scorer, task, settings, advance)
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
        "accuracy": accuracy.to_dict("records"),
        "recalls": recalls.astype(object).where(recalls.notna(), None).to_dict("records"),
        "provenance": provenance(),
    }


def main() -> None:
    """Measure, write and print."""
    parser = Parser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, metavar="RUN", help="a run, or one of its checkpoints")
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
    add_arguments(parser, RecallSettings)
    options = parser.parse_args()
    result = recall_of_checkpoint(options.checkpoint, settings_from(RecallSettings, options))
    write_json(options.out / "recall.json", result)
    print(show(pd.DataFrame(result["accuracy"]), title="samples that are answered right [%]"), end="\n\n")
    print(show(pd.DataFrame(result["recalls"]), across="k", title="recall [%] by k"))
    print(f"\nwrote recall.json to {options.out}")


if __name__ == "__main__":
    run_script(main)
