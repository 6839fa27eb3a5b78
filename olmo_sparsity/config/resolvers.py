"""What ``${name:…}`` can ask for in a config: OmegaConf's and OLMo's own resolvers, but not the whole environment.

A resolved config is printed, saved beside every checkpoint and sent to experiment trackers, and a secret in the
environment would go with it. Only the few variables that tell jobs and scratch folders apart can be read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from olmo.config import TrainConfig
from olmo.util import is_url
from omegaconf import OmegaConf as om
from omegaconf.basecontainer import BaseContainer

from olmo_sparsity.config.words import shorten

_BY_SCHEDULER = {
    "Slurm": """SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID SLURM_SUBMIT_DIR
        SLURM_TMPDIR SLURM_RESTART_COUNT""",
    "PBS": "PBS_JOBID PBS_JOBNAME PBS_ARRAYID PBS_ARRAY_INDEX PBS_O_WORKDIR",
    "LSF": "LSB_JOBID LSB_JOBNAME LSB_JOBINDEX LS_SUBCWD",
    "Grid Engine": "JOB_ID JOB_NAME SGE_TASK_ID SGE_O_WORKDIR",
    "others": "FLUX_JOB_ID COBALT_JOBID OAR_JOB_ID",
    "OLMo's own files, on LUMI": "SCRATCH_DIR",
}
READABLE = frozenset(name for names in _BY_SCHEDULER.values() for name in names.split())
"""The environment variables that a config may read."""


@contextmanager
def config_resolvers() -> Iterator[None]:
    """Inside, OmegaConf has these resolvers and no others; afterwards those that it had before."""
    before = BaseContainer._resolvers  # there is no public way to put resolvers back
    try:
        om.clear_resolvers()  # into a new table: what a notebook has registered is not for files from elsewhere
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # OLMo 0.6 calls a function that OmegaConf has deprecated
            TrainConfig._register_resolvers()
            _replace("oc.env", _env)
            _replace("path.last_checkpoint", _local_last_checkpoint)
        yield
    finally:
        BaseContainer._resolvers = before


def _replace(name: str, resolver: Any) -> None:
    om.register_new_resolver(name, resolver, replace=True)


def _env(name: str, *default: Any) -> Any:
    """As OmegaConf's `oc.env`, for the `READABLE` variables.

    It is asked with the name that is left when everything in it is resolved, so that no nesting gets around it.
    """
    if name not in READABLE:
        raise ValueError(
            f"{shorten(str(name), 40)} is not for configs, which are saved and shown; "
            "write the value, or pass it as an override"
        )
    if name in os.environ:
        return os.environ[name]
    if not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return None if default[0] is None else str(default[0])


def _local_last_checkpoint(path: str) -> str:
    """As OLMo's, which would ask S3 or Google Storage, with the user's credentials, about a URL."""
    from olmo.util import find_latest_checkpoint

    if is_url(path):
        raise ValueError(f"{shorten(path, 60)} is no folder; copy the checkpoint here")
    found = find_latest_checkpoint(path)
    if found is None:
        raise FileNotFoundError(f"Could not find a latest checkpoint at {path}")
    return str(found)
