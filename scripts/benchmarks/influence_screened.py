"""What selectors cost and what they find, on the same targets: exact, screened, and those of other packages."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from analysis.measure.crossfit import ModelChooser
from analysis.measure.influence import InfluenceEngine, selection_rounds, targets_per_batch
from analysis.measure.selectors import SELECTORS, Question, Selection, check_selector, find_selector
from analysis.model.load import LoadedModel
from analysis.model.scorer import Scorer
from analysis.records.schema import FAR_CONTEXTS, Targets
from analysis.stats.bootstrap import ClusterBootstrap, Statistic, count_clusters, difference, ratio_of_sums
from analysis.stats.recovery import net_recovery
from analysis.text.contexts import Contexts, sample_targets
from analysis.text.decode import TextDecoder
from benchmarks.other_selectors import other_selectors
from benchmarks.settings import InfluenceSettings
from benchmarks.timing import Json, synchroniser
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress

EXACT = "leave-one-out"
SCREENS = (
    *(f"{EXACT}@{proposer}:{m}" for proposer in ("gradient", "attention") for m in (16, 32)),
    *(f"{EXACT}@spans:{m}" for m in (8, 16)),
    "greedy@gradient:32",
)
KS = (1, 2, 4, 8)
SHOWN_K = 4
"""The k of the figure."""
_BACKWARD_FORWARDS = 2  # a backward pass computes about twice what its forward pass does

Find = Callable[[Question], Selection]


def measure_screened(loaded: LoadedModel, settings: InfluenceSettings) -> Json:
    """Net recovery and processor time of every selector on the sampled targets over tau, and both relative to `EXACT`.

    A selector chooses in the true and the placebo far context; both are timed. What is kept of the exact selector's net
    recovery is the ratio of the two, resampled together (by document).
    """
    assert settings.corpus is not None
    tokens = TokenFiles.of_split(settings.corpus, "heldout")
    scorer = Scorer(loaded.model, device=settings.device or "cpu")
    if settings.selectors:  # the exact one is what the others are compared with
        found = {name: find_selector(name) for name in dict.fromkeys((EXACT, *settings.selectors))}
    else:
        found = {name: find_selector(name) for name in (*SELECTORS, *SCREENS) if _fits(name, settings)}
        found |= other_selectors(loaded.model)
    chooser = CountingChooser(scorer, found, settings.seed)
    decoder = TextDecoder.from_file(loaded.tokenizer_file)
    sizes = settings.n_long, settings.n_short
    engine = InfluenceEngine(tokens, decoder, scorer, chooser, *sizes, KS, tuple(found))
    sampled = sample_targets(
        tokens, settings.sampled_targets, n_long=settings.n_long, n_short=settings.n_short, seed=settings.seed
    )
    count, size = len(sampled.position), targets_per_batch(1)
    ids = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    targets = Targets.joined([engine.measure_gains(sampled, rows, rows) for rows in ids])
    over = targets.over(settings.tau_nats)
    if not len(over):
        raise UserError(
            f"none of {count} targets gains more than tau; lower --tau or raise --sampled-targets"
        )
    recovered = _recovered(engine, targets, over)
    measures = _net_recoveries(recovered, targets, over, settings.seed)
    for name, row in measures.items():
        row["seconds_per_target"] = chooser.seconds[name] / len(over)
        row["time_ratio"] = chooser.seconds[name] / chooser.seconds[EXACT]
        row["tokens_per_target"] = chooser.tokens[name] / len(over)
    return {
        "k": SHOWN_K,
        "targets": count,
        "over_tau": len(over),
        "tau_nats": settings.tau_nats,
        **count_clusters(targets.document[over], targets.groups_of(over)),
        "selectors": measures,
    }


def _recovered(engine: InfluenceEngine, targets: Targets, over: np.ndarray) -> dict[str, np.ndarray]:
    """L_short - L_k of every selector, (true and placebo far context, m, K) nats."""
    recovered = {name: np.zeros((len(FAR_CONTEXTS), len(over), len(KS))) for name in engine.selectors}
    place = {target: at for at, target in enumerate(targets.target_id[over].tolist())}
    with progress("selectors side by side", len(over), "targets") as advance:
        for rows in selection_rounds(targets, over, 1):
            for chosen in engine.select(targets, rows):
                at = place[chosen.target_id]
                gain = targets.loss_short_nats[over[at]] - np.asarray(chosen.loss_nats)
                recovered[chosen.selector][FAR_CONTEXTS.index(chosen.far_context), at] = gain
            advance(len(rows))
    return recovered


def _fits(name: str, settings: InfluenceSettings) -> bool:
    try:
        check_selector(name, k_max=max(KS), n_far=settings.n_long - settings.n_short)
    except UserError:
        return False
    return True


class CountingChooser(ModelChooser):
    """Counts what each selector costs."""

    def __init__(self, scorer: Scorer, selectors: dict[str, Find], seed: int):
        super().__init__(scorer, seed=seed, k_max=max(KS))
        self._find = selectors
        self.seconds: dict[str, float] = defaultdict(float)
        """Of the processor, all its cores added up, so that other work on the machine counts little; of the clock on a
        GPU."""
        self.tokens: Counter[str] = Counter()
        self._clock = time.process_time if scorer.device.type == "cpu" else time.perf_counter

    def select(self, selector: str, contexts: Contexts, asked: np.ndarray, far_context: str) -> Selection:
        """See `Chooser`."""
        question = Question(self.scorer, contexts, self.seed, self.k_max, asked)
        synchronise = synchroniser(self.scorer.device.type)
        with counted_tokens(self.scorer.model) as counts:
            synchronise()
            started = self._clock()
            chosen = self._find[selector](question)
            synchronise()
            self.seconds[selector] += self._clock() - started
        self.tokens[selector] += sum(counts)
        return chosen


def _net_recoveries(
    recovered: dict[str, np.ndarray], targets: Targets, over: np.ndarray, seed: int
) -> dict[str, Json]:
    """Recovery, placebo and net recovery by k; what is kept of `EXACT`'s net recovery, and the difference from it."""
    columns = [targets.gain_nats[over, None]]
    columns += [np.concatenate([true, placebo], axis=1) for true, placebo in recovered.values()]
    document, groups = targets.document[over], targets.groups_of(over)
    bootstrap = ClusterBootstrap(np.concatenate(columns, axis=1), document, groups=groups, seed=seed)
    of_name: dict[str, dict[str, list[Statistic]]] = {}
    for number, name in enumerate(recovered):
        true, placebo = (
            [ratio_of_sums(1 + (2 * number + part) * len(KS) + i, 0) for i in range(len(KS))]
            for part in (0, 1)
        )
        net = [net_recovery(*pair) for pair in zip(true, placebo, strict=True)]
        of_name[name] = {"recovery": true, "placebo_recovery": placebo, "net_recovery": net}
    exact = of_name[EXACT]["net_recovery"]
    rows: dict[str, Json] = {}
    for name, statistics in of_name.items():
        pairs = list(zip(statistics["net_recovery"], exact, strict=True))
        apart = [difference(*pair) for pair in pairs]
        kept = [_share(*pair) for pair in pairs]
        statistics |= {"difference_of_net_recovery": apart, "net_recovery_kept": kept}
        rows[name] = {
            called: {str(k): bootstrap.interval(each).as_dict() for k, each in zip(KS, by_k, strict=True)}
            for called, by_k in statistics.items()
        }
    return rows


def _share(part: Statistic, whole: Statistic) -> Statistic:
    """Their ratio; NaN where the whole is not positive."""

    def statistic(sums: np.ndarray) -> np.ndarray:
        below = whole(sums)
        return part(sums) / np.where(below > 0, below, np.nan)

    return statistic


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """While it runs, every forward pass of an `AnalysedModel` appends the tokens that it computes.

    A pass that is differentiated counts three times, for its backward pass [ours].
    """
    counts: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read = args[0] if args else kwargs.get("input_ids")
        if read is None:  # embedded by the caller
            (name,) = {"inputs_embeds", "input_embeddings"} & kwargs.keys()
            read = kwargs[name][..., 0]
        counts.append(read.numel() * (1 + _BACKWARD_FORWARDS * torch.is_grad_enabled()))

    handle = model.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()
