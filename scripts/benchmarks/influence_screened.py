"""What selectors cost and what they find, on the same targets: exact, screened, and those of other packages."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from analysis.measure.crossfit import ModelChooser
from analysis.measure.influence import InfluenceEngine
from analysis.measure.selectors import SELECTORS, Question, Selection, check_selector, find_selector
from analysis.model.load import LoadedModel
from analysis.model.scorer import Scorer
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, Statistic, count_clusters, difference
from analysis.stats.recovery import SumsBootstrap
from analysis.text.contexts import Contexts, sample_targets
from analysis.text.decode import TextDecoder
from benchmarks.other_selectors import other_selectors
from benchmarks.recovered import KS, gains_of, recovered_columns
from benchmarks.settings import InfluenceSettings
from benchmarks.timing import Json, synchroniser
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError

EXACT = "leave-one-out"
SCREENS = (
    *(f"{EXACT}@{proposer}:{m}" for proposer in ("gradient", "attention") for m in (16, 32)),
    *(f"{EXACT}@spans:{m}" for m in (8, 16)),
    "greedy@gradient:32",
)
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
    targets = gains_of(engine, sampled)
    over = targets.over(settings.tau_nats)
    if not len(over):
        raise UserError(
            f"none of {len(targets)} targets gains more than tau; lower --tau or raise --sampled-targets"
        )
    columns = recovered_columns(engine, targets, over, "selectors side by side")
    of_over = {name: column[over] for name, column in columns.items()}
    document, groups = targets.document[over], targets.groups_of(over)
    sums = SumsBootstrap(of_over, document, DEFAULT_RESAMPLES, settings.seed, groups)
    measures = {name: _recoveries(sums, name) for name in found}
    for name, row in measures.items():
        row["seconds_per_target"] = chooser.seconds[name] / len(over)
        row["time_ratio"] = chooser.seconds[name] / chooser.seconds[EXACT]
        row["tokens_per_target"] = chooser.tokens[name] / len(over)
    return {
        "k": SHOWN_K,
        "targets": len(targets),
        "over_tau": len(over),
        "tau_nats": settings.tau_nats,
        **count_clusters(document, groups),
        "selectors": measures,
    }


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

    def select(
        self, selectors: Sequence[str], contexts: Contexts, asked: np.ndarray, far_context: str
    ) -> dict[str, Selection]:
        """See `Chooser`."""
        question = Question(self.scorer, contexts, self.seed, self.k_max, asked)
        return {name: self._choose(name, question) for name in selectors}

    def _choose(self, selector: str, question: Question) -> Selection:
        synchronise = synchroniser(self.scorer.device.type)
        with counted_tokens(self.scorer.model) as counts:
            synchronise()
            started = self._clock()
            chosen = self._find[selector](question)
            synchronise()
            self.seconds[selector] += self._clock() - started
        self.tokens[selector] += sum(counts)
        return chosen


def _recoveries(sums: SumsBootstrap, name: str) -> Json:
    """Recovery, placebo and net recovery by k; what is kept of `EXACT`'s net recovery, and the difference from it."""
    found: Json = {}
    for k in KS:
        statistics = sums.recovery_statistics(name, k)
        net, exact = (sums.recovery_statistics(each, k)["net_recovery"] for each in (name, EXACT))
        statistics |= {
            "difference_of_net_recovery": difference(net, exact),
            "net_recovery_kept": _share(net, exact),
        }
        for called, each in statistics.items():
            found.setdefault(called, {})[str(k)] = sums.interval(each)
    return found


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
