"""The selector of a name: what is registered, where it ranks, screened, and with what near tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from analysis.policies.policy import Policy
from analysis.selectors.by_policy import ByPolicy
from analysis.selectors.names import AS_TEXT, OTHER_NEAR, Screen, SelectorName
from analysis.selectors.selector import Selection, Selector, SelectorInput
from olmo_sparsity.util.errors import UserError


def find_selector(name: str) -> Selector:
    """The selector of a name as users write it. Raises `UserError` where there is none, with the choices."""
    return selector_of(SelectorName.parse(name))


def selector_of(name: SelectorName) -> Selector:
    """The selector of a parsed name."""
    if name.other_near:
        return _with_other_near(name)
    selector = _registered(name)
    if name.screen is not None:
        selector = screened(selector, name.screen)
    if name.ranked_in == AS_TEXT:
        return selector
    return lambda inputs: selector(replace(inputs, ranked_in=name.ranked_in))


def _registered(name: SelectorName) -> Selector:
    """The selector of a base with its parameters."""
    item = name.registered.item
    if isinstance(item, type):
        item = item(**dict(name.parameters))
    if isinstance(item, Policy):
        return ByPolicy(item)
    return cast("Selector", item)


def _with_other_near(name: SelectorName) -> Selector:
    """The selector of a name that ends with `OTHER_NEAR`."""
    selector = selector_of(replace(name, other_near=False))

    def select(inputs: SelectorInput) -> Selection:
        if inputs.other_near is None:
            raise UserError(f"{name}: there are no other near tokens here; leave {OTHER_NEAR} out")
        return selector(replace(inputs.other_near, k=inputs.k))

    return select


def screened(exact: Selector, screen: Screen) -> Selector:
    """The choice of ``exact`` among the m tokens that the proposer puts first.

    For a target alone in its block it costs what the proposer costs and m / F of what the exact selector costs. Targets
    of a block are offered tokens of their own, and share no passes. Where the exact selector runs, too, and compares
    subsets, these are among its subsets and are not read again.
    """
    proposer = selector_of(screen.proposer)

    def select(inputs: SelectorInput) -> Selection:
        sinks = inputs.ranked_in.sinks
        if (screen, sinks) not in inputs.proposals:
            count = min(screen.count + sinks, inputs.contexts.n_far)
            proposal = replace(inputs, k=count, ranked_in=AS_TEXT)
            if inputs.proposing is not None:
                proposal = replace(proposal, scorer=inputs.proposing, names=(), shared={})
            proposed = proposer(proposal).columns
            no_sinks = [row[row >= sinks][: screen.count] for row in proposed]
            inputs.proposals[screen, sinks] = np.sort(np.stack(no_sinks), axis=1)
        of_proposed = replace(inputs, columns=inputs.proposals[screen, sinks], screen=screen)
        return exact(of_proposed)

    return select
