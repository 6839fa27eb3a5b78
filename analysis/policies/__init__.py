"""Eviction policies of key-value caches, each in the file that is named after what it looks at."""

from analysis.policies import attention, expected_attention, keys, kvzip, places
from analysis.policies.attention import with_observers
from analysis.policies.kvpress import from_kvpress
from analysis.policies.policy import POLICIES, Policy, find_policy

__all__ = [
    "POLICIES",
    "Policy",
    "attention",
    "expected_attention",
    "find_policy",
    "from_kvpress",
    "keys",
    "kvzip",
    "places",
    "with_observers",
]
