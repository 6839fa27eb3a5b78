"""Errors that a user can mend are known as such."""

import errno
import resource

import pytest
import torch
from safetensors.torch import save_file

from olmo_sparsity.util.errors import BAD_INPUT_EXIT_CODE, exit_code_of, is_full_disk


def test_a_full_disk_is_known_from_python_and_from_safetensors(tmp_path):
    """The export writes by the library's own writer, whose error is no OSError."""
    writers = {
        "python": lambda path: path.write_bytes(bytes(9000)),
        "safetensors": lambda path: save_file({"zeros": torch.zeros(9000)}, path),
    }
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            with pytest.raises(Exception, match="File too large") as error:
                write(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert is_full_disk(error.value), name
        assert exit_code_of(error.value) == BAD_INPUT_EXIT_CODE  # a job that starts again would fill it again


def test_other_errors_are_no_full_disk():
    assert is_full_disk(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_full_disk(OSError(errno.ENOENT, "No such file or directory"))
    assert not is_full_disk(ValueError("(os error 28)"))
