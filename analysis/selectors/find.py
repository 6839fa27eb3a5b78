"""The selector of a name."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from analysis.parameters import made
from analysis.policies.policy import Policy
from analysis.selectors.by_policy import ByPolicy
from analysis.selectors.names import OTHER_NEAR, ranked_in
from analysis.selectors.registry import BY_SUBSETS, CONTROL, FAMILIES, SELECTORS
from analysis.selectors.selector import Selection, Selector, SelectorInput
from olmo_sparsity.util.errors import UserError


def find_selector(name: str) -> Selector:
    """The selector of that name, with where it ranks, screened (`screened`), and with what near tokens (`OTHER_NEAR`).

    Raises `UserError` for another name.
    """
    if name.endswith(OTHER_NEAR):
        return _with_other_near(name)
    exact, at, screen = name.partition("@")
    if at:
        proposer, _, count = screen.rpartition(":")
        if not count.isdecimal() or not proposer:
            raise UserError(
                f"{name!r} is no screened selector; write EXACT@PROPOSER:m, such as leave-one-out@gradient:32"
            )
        screened_selector = screened(_registered(exact), _ranking(proposer), int(count), at + screen)
        return _where(screened_selector, exact)
    return _ranking(name)


def _ranking(name: str) -> Selector:
    """The selector of NAME or NAME/LEVEL:SINKS."""
    return _where(_registered(name), name)


def _with_other_near(name: str) -> Selector:
    """The selector of a name that ends with `OTHER_NEAR`."""
    by_near = name.removesuffix(OTHER_NEAR)
    if by_near in FAMILIES[CONTROL]:
        raise UserError(f"{name}: {by_near} does not look at the near tokens; leave {OTHER_NEAR} out")
    if by_near.endswith(OTHER_NEAR):
        raise UserError(f"{name}: {OTHER_NEAR} ends a name once; leave the second one out")
    selector = find_selector(by_near)

    def select(inputs: SelectorInput) -> Selection:
        if inputs.other_near is None:
            raise UserError(f"{name}: there are no other near tokens here; leave {OTHER_NEAR} out")
        return selector(replace(inputs.other_near, k=inputs.k))

    return select


def _where(selector: Selector, name: str) -> Selector:
    """The selector, ranking where its name says."""
    where = ranked_in(name)
    if where is None:
        return selector
    return lambda inputs: selector(replace(inputs, ranked_in=where))


def _registered(text: str) -> Selector:
    """The selector of NAME or NAME:PARAMETER=NUMBER:…, wherever it ranks. Raises `UserError` that lists the choices."""
    text, slash, _ = text.partition("/")
    name, *parts = text.split(":")
    selector = SELECTORS[name]
    if slash and name not in BY_SUBSETS:
        raise UserError(f"{name} reads no subsets to rank by; in the cache rank {', '.join(BY_SUBSETS)}")
    chosen = made(selector, text, parts)
    if isinstance(chosen, Policy):
        return ByPolicy(chosen)
    return cast("Selector", chosen)


def check_selector(name: str, *, k_max: int, n_far: int) -> None:
    """Raise `UserError` where a selector does not exist, or is to rank more tokens than it has candidates.

    A screened form has those that were proposed, of which there are at most F without the sinks of both.
    """
    find_selector(name)
    where = ranked_in(name)
    sinks = 0 if where is None else where.sinks
    candidates = n_far - sinks
    if k_max > candidates:
        raise UserError(
            f"{name}: {sinks} of the {n_far} far tokens are sinks, so that k = {k_max} cannot be chosen; lower k"
        )
    if "@" not in name:
        return
    proposer, _, count = name.removesuffix(OTHER_NEAR).partition("@")[2].rpartition(":")
    where = ranked_in(proposer)
    if where is not None:
        candidates = min(candidates, n_far - where.sinks)
    m = int(count)
    if not k_max <= m <= candidates:
        raise UserError(
            f"{name}: m = {m} must be at least k = {k_max} and at most the {candidates} far tokens"
        )


def screened(exact: Selector, proposer: Selector, count: int, screen: str) -> Selector:
    """The choice of ``exact`` among the ``count`` tokens that ``proposer`` puts first (m of the screened forms).

    Costs what the proposer costs and count / F of what the exact selector costs.
    """

    def select(inputs: SelectorInput) -> Selection:
        sinks = len(inputs.sinks)
        of_screen = f"{screen} but {sinks} sinks"
        if (of_screen, "columns") not in inputs.shared:
            proposal = replace(inputs, k=min(count + sinks, inputs.contexts.n_far), ranked_in=None)
            if inputs.proposing is not None:
                proposal = replace(proposal, scorer=inputs.proposing, names=(), shared={})
            proposed = proposer(proposal).columns
            no_sinks = [row[row >= sinks][:count] for row in proposed]
            inputs.shared[of_screen, "columns"] = np.sort(np.stack(no_sinks), axis=1)
        of_proposed = replace(inputs, columns=inputs.shared[of_screen, "columns"], screen=screen)
        return exact(of_proposed)

    return select
