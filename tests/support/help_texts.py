"""Prints as JSON what scripts print for --help, and which heavy modules they load for it.

    python help_texts.py '[["scripts/train.py"], …]' '["torch", …]'       [script, arguments …] each, and the heavy ones

Every script is run in a fork of this process, which has loaded what most of them need of other packages, and nothing
that is heavy or the project's: that takes most of the time of a new process.
"""

import asyncio  # noqa: F401
import json
import os
import runpy
import sys
import tempfile

import numpy  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401


def in_a_fork(script, arguments, heavy):
    """Exit code, what was printed, and the heavy modules that were loaded."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as loaded:
        child = os.fork()
        if not child:
            os.dup2(printed.fileno(), 1)
            sys.argv, sys.path[0] = [script, *arguments, "--help"], os.path.dirname(script)
            code = 1
            try:
                runpy.run_path(script, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stdout.flush()
                json.dump(sorted(heavy & sys.modules.keys()), loaded)
                loaded.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        loaded.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read(), json.load(loaded)


if __name__ == "__main__":
    commands, heavy = (json.loads(each) for each in sys.argv[1:])
    known = {*heavy, "olmo_sparsity", "analysis"} & sys.modules.keys()
    assert not known, f"{known} are loaded before a script is"
    print(json.dumps([in_a_fork(script, rest, set(heavy)) for script, *rest in commands]))
