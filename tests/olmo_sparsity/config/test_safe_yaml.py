"""Texts of configs that would end the process, take minutes, or carry the environment's secrets away."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from olmo_sparsity.config import safe_yaml
from olmo_sparsity.config.load import load_config
from tests.olmo_sparsity.config.conftest import BASE, TINY, Write, refusal

NESTED = "[" * 100_000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "nested lists": (f"a: {NESTED}", "nested more than 32 deep"),
    "nested sections": ("\n".join(" " * depth + "a:" for depth in range(900)), "nested more than 32 deep"),
    "nested interpolation": (f"run_name: '{'${a:' * 300}{'}' * 300}'", "a value of 1,500 characters"),
    "long interpolation": (f"run_name: '{'${' * 2000}'", "a value of 4,000 characters"),
    "aliases of aliases": (LAUGHS, "its aliases make far more of it"),
    "alias of itself": ("a: &a [*a]", "it holds itself"),
    "long number": (f"seed: {'9' * 5000}", "a number of 5,000 digits"),
    "long base 60": (f"seed: 1{':10' * 1000}", "a number of 3,001 digits"),
    "huge text": (f"run_name: {'x' * 5_000_000}", "a value of 5,000,000 characters"),
    "large number": ("optimizer: {learning_rate: 1" + "0" * 99 + "}\nseed: 1" + "0" * 90, "seed: 1000"),
    "tab": ("model:\n\trope: true", "line 2, column 1: malformed YAML"),
    "NUL": ("seed: 1\0", "control characters are not allowed"),
    "written twice": ("model: {rope: true}\nmodel: {d_model: 8}", "found duplicate key model"),
    "no date": ("run_name: !!timestamp 2001-13-99", "cannot be read"),
    "an object": ("seed: !!python/object/apply:os.system [true]", "malformed YAML"),
    "a path": ("seed: !!python/object/apply:pathlib.Path [1]", "cannot be read"),
    "one number": ("1.5", "holds one value"),
    "nothing but its type": ("!!binary ", "holds one value"),
    "one text": ("'1:2:3'", "holds one value"),
    "text of hostile text": (f"'{NESTED[:9000]}'", "holds one value"),
    "key with a line end": ('"a\\nb\\e[31m": 1', r"a\nb\x1b[31m: unknown key"),
    "too many values": ("a: [" + "b, " * 100_001 + "]", "more than 100,000 values"),
}


class TestHostileText:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_refused_in_one_line_at_once(self, write: Write, name: str) -> None:
        text, part = HOSTILE[name]
        path, start = write(text), time.monotonic()
        message = refusal(path)
        assert part in message and message.isprintable() and len(message) < 300
        assert time.monotonic() - start < 5

    @pytest.mark.parametrize(
        ("value", "part"),
        [
            (NESTED, "nested more than 32 deep"),
            ("{a: 1, a: 2}", "found duplicate key a"),
            ("9" * 5000, "a number of 5,000 digits"),
            ("a\0b", "control characters are not allowed"),
            ("\udcff", "cannot be read"),
        ],
    )
    def test_overrides_too(self, value: str, part: str) -> None:
        message = refusal(BASE, f"--seed={value}")
        assert part in message and message.isprintable() and len(message) < 300

    def test_names_of_overrides_too(self) -> None:
        for name in ("a." * 5000 + "b", "x" * 5000, "a\nb", "a\x1b[31m"):
            message = refusal(BASE, f"--{name}=1")
            assert message.isprintable() and len(message) < 300

    @pytest.mark.parametrize(
        "path", ["/dev/zero", "/dev/null", "/proc/self/environ", "/", "a\0b", "a" * 5000]
    )
    def test_what_is_no_file_of_yaml(self, write: Write, path: str) -> None:
        for message in (refusal(Path(path)), refusal(write(f'base: "{path}"'.replace("\0", "\\0")))):
            assert "\n" not in message and len(message) < 6000

    def test_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.yaml")
        assert (
            refusal(tmp_path / "x.yaml") == "FILE: cannot be read: it is a device or a pipe; name a YAML file"
        )

    def test_base_files_without_end(self, write: Write) -> None:
        for number in range(2000):
            write(f"base: {number + 1}.yaml", f"{number}.yaml")
        assert "its base files are more than 16; put some of them together" in refusal(write("base: 0.yaml"))

    def test_unknown_keys_without_end(self, write: Write) -> None:
        lines = refusal(write("\n".join(f"key{number}: 1" for number in range(5000)))).splitlines()
        assert lines[0] == "5000 problems in FILE:" and lines[-1] == "  … and 4,900 more"
        assert len(lines) == 102

    def test_a_large_file_without_aliases_is_no_attack(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """OmegaConf's limit met every large file: the run of a corpus of ten thousand files could not be resumed."""
        monkeypatch.setenv("OMEGACONF_MAX_YAML_EXPANDED_NODES", "50")
        monkeypatch.setattr(safe_yaml, "MAX_ALIASED_NODES", 50)
        load_config(TINY)


class TestEnvironment:
    """A resolved config is printed, saved and sent to trackers; nothing of the environment may go with it."""

    SECRET = "s3cr3t-0f-th3-us3r"

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("MY_TOKEN", "SLURM_JOB_NAME_X"):
            monkeypatch.setenv(name, self.SECRET)
        for name in ("SLURM_JOB_ID", "SCRATCH_DIR", "PBS_JOBID"):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize(
        "value",
        [
            "${oc.env:MY_TOKEN}",
            "a/${oc.env:MY_TOKEN}/b",
            "${oc.env:MY_TOKEN,x}",
            "${oc.env:'MY_TOKEN'}",
            "${oc.env:MY_${entity}}",
            "${oc.env:${whole}}",
            "${oc.env:SLURM_JOB_ID,${oc.env:MY_TOKEN}}",
            "${oc.decode:${oc.env:MY_TOKEN}}",
            "${oc.decode:'${indirect}'}",
            "${oc.decode:'[${oc.env:MY_TOKEN}]'}",
            "${oc.create:{a: '${oc.env:MY_TOKEN}'}}",
            "${path.choose:${oc.env:MY_TOKEN},x}",
            "${path.glob:/tmp/${oc.env:MY_TOKEN}}",
            "${oc.select:wandb.group,${oc.env:MY_TOKEN}}",
            "${ oc.env : MY_TOKEN }",
            "${oc.env:SLURM_JOB_NAME_X}",
        ],
    )
    def test_no_way_around(self, write: Write, value: str) -> None:
        value = value.replace("${entity}", "${wandb.entity}").replace("${whole}", "${wandb.name}")
        value = value.replace("${indirect}", "${wandb.project}")
        helpers = {"entity": "TOKEN", "name": "MY_TOKEN"}
        if "wandb.project" in value:
            helpers["project"] = "${oc.env:MY_TOKEN}"
        base = write(yaml.safe_dump({"run_name": value, "wandb": helpers}), "base.yaml")
        listed = write(yaml.safe_dump({"data": {"paths": ["a", value]}, "wandb": helpers}), "list.yaml")
        section = [f"--wandb.{name}={text}" for name, text in helpers.items()]
        messages = [
            refusal(base),
            refusal(write("base: base.yaml")),
            refusal(listed),
            refusal(BASE, *section, f"--run_name={json.dumps(value)}"),
            refusal(BASE, *section, f"--task.parameters={{a: [{json.dumps(value)}]}}"),
        ]
        for message in messages:
            assert "is not for configs" in message and "or pass it as an override" in message
            assert self.SECRET not in message

    def test_job_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        value = "--run_name=${oc.env:SLURM_JOB_ID,none}-${oc.env:PBS_JOBID,null}"
        assert load_config(BASE, [value]).run_name == "none-None"
        monkeypatch.setenv("SLURM_JOB_ID", "123")
        assert load_config(BASE, [value]).run_name == "123-None"

    def test_the_folder_of_olmos_own_files(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        value = (
            "${path.choose:${oc.env:SCRATCH_DIR,no_exist}/checkpoints,/}/${oc.env:SLURM_JOB_ID,${run_name}}"
        )
        options = [f"--save_folder={value}", "--run_name=a"]
        assert load_config(BASE, options).save_folder == "//a"
        monkeypatch.setenv("SCRATCH_DIR", str(tmp_path))
        (tmp_path / "checkpoints").mkdir()
        assert load_config(BASE, options).save_folder == f"{tmp_path}/checkpoints/a"

    def test_what_would_be_resolved_when_it_is_read_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        later = "still has ${ in it when it is resolved"
        assert later in refusal(BASE, r"--run_name=\${oc.env:MY_TOKEN}")
        monkeypatch.setenv("SLURM_JOB_NAME", "${oc.env:MY_TOKEN}")
        assert later in refusal(BASE, "--run_name=${oc.env:SLURM_JOB_NAME}")
        message = refusal(BASE, "--run_name=${oc.decode:${oc.env:SLURM_JOB_NAME}}")
        assert "is not for configs" in message and self.SECRET not in message

    def test_no_cloud_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("olmo.util._s3_find_latest_checkpoint", lambda *_: pytest.fail("S3 was asked"))
        assert "is no folder" in refusal(BASE, "--run_name=${path.last_checkpoint:'s3://bucket/run'}")

    def test_resolvers_stay_as_they_were(self) -> None:
        OmegaConf.register_new_resolver("mine", lambda: "x", replace=True)
        try:
            before = BaseContainer._resolvers
            copy = dict(before)
            assert "mine" in refusal(BASE, "--run_name=${mine:}")
            load_config(BASE)
            assert BaseContainer._resolvers is before and before == copy
            assert OmegaConf.create({"a": "${oc.env:MY_TOKEN}${mine:}"}).a == f"{self.SECRET}x"
        finally:
            OmegaConf.clear_resolver("mine")
