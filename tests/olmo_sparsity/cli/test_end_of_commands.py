"""How a command ends: with a line for what a user can mend, and a traceback for a defect."""

import errno
import json
import os
import sys

import pytest
import torch
from olmo.exceptions import OLMoConfigurationError

from olmo_sparsity.cli import run_script
from olmo_sparsity.util.errors import (
    BAD_INPUT_EXIT_CODE,
    FAILED_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    OtherRankFailed,
    UserError,
)


def run_failing(error):
    """Run a script that raises this."""

    def main():
        raise error

    run_script(main)


def test_what_the_system_refuses_is_one_line(capsys):
    for error in (OSError(30, "Read-only file system", "/a/file"), OSError(28, "No space left on device")):
        with pytest.raises(SystemExit, match="1"):
            run_failing(error)
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and str(error) in printed


def test_ctrl_c_has_its_exit_code_and_a_defect_keeps_its_traceback():
    with pytest.raises(SystemExit, match="130"):
        run_failing(KeyboardInterrupt())
    bad_descriptor = OSError(9, "Bad file descriptor")
    for error in (ValueError("ours"), RuntimeError("ours"), bad_descriptor, json.JSONDecodeError("x", "", 0)):
        with pytest.raises(type(error)):
            run_failing(error)


@pytest.fixture
def ends_under_a_launcher(monkeypatch, capsys):
    """The exit code, and what is printed, of a process of many that ends with this error."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(os, "_exit", sys.exit)

    def run(error):
        with pytest.raises(SystemExit) as end:
            run_failing(error)
        return end.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("seed: no number"), BAD_INPUT_EXIT_CODE),
        (OLMoConfigurationError("n_heads"), BAD_INPUT_EXIT_CODE),
        (ModuleNotFoundError("No module named 'x'", name="x"), BAD_INPUT_EXIT_CODE),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a/file"), BAD_INPUT_EXIT_CODE),
        (PermissionError("[Errno 13] Failed to open local file"), BAD_INPUT_EXIT_CODE),
        (OSError(errno.ENOSPC, "No space left on device"), BAD_INPUT_EXIT_CODE),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OUT_OF_MEMORY_EXIT_CODE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."), OUT_OF_MEMORY_EXIT_CODE),
        (torch.distributed.DistBackendError("Cuda failure 2 'out of memory'"), OUT_OF_MEMORY_EXIT_CODE),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY_EXIT_CODE),
        (MemoryError(), OUT_OF_MEMORY_EXIT_CODE),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OUT_OF_MEMORY_EXIT_CODE),
        (OSError(errno.ESTALE, "Stale file handle", "/a/file"), FAILED_EXIT_CODE),
        (OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", "/a"), FAILED_EXIT_CODE),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), FAILED_EXIT_CODE),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), FAILED_EXIT_CODE),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), FAILED_EXIT_CODE),
        (OtherRankFailed("rank 0 failed (MemoryError)", OUT_OF_MEMORY_EXIT_CODE), OUT_OF_MEMORY_EXIT_CODE),
    ],
    ids=repr,
)
def test_the_exit_code_says_whether_another_start_may_help(ends_under_a_launcher, error, code):
    ended, printed = ends_under_a_launcher(error)
    assert ended == code
    assert printed.splitlines()[-1].startswith("error: rank 1: ")
    assert "device_train_microbatch_size" in printed or code != OUT_OF_MEMORY_EXIT_CODE or "rank 0" in printed


def test_bad_input_that_a_file_system_made_may_be_good_the_next_time(ends_under_a_launcher):
    error = UserError("/a/file cannot be read (Stale file handle); copy it again")
    error.__cause__ = OSError(errno.ESTALE, "Stale file handle", "/a/file")
    assert ends_under_a_launcher(error) == (FAILED_EXIT_CODE, f"error: rank 1: {error}\n")
