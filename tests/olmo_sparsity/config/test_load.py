"""Loading, overriding and refusing configs; OLMo's own loader is the reference where both load a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from olmo.config import ModelConfig as OLMoModelConfig
from olmo.config import TrainConfig
from olmo.util import clean_opt

from olmo_sparsity.config.load import Config, ignored_fields, load_config
from olmo_sparsity.config.schema import ModelConfig
from tests.olmo_sparsity.config.conftest import BASE, ROOT, TINY, Write, refusal

pytestmark = pytest.mark.filterwarnings("ignore:register_new_resolver")  # of OLMo's own loader


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


def only_olmo(config: Config) -> dict[str, Any]:
    """``config`` as a dictionary, without the fields that OLMo does not have."""
    added = {item.name for item in fields(Config)} - {item.name for item in fields(TrainConfig)}
    values = config.asdict(exclude=added)
    for item in {item.name for item in fields(ModelConfig)} - {item.name for item in fields(OLMoModelConfig)}:
        del values["model"][item]
    del values["data"]["skip_steps"]
    if values["compile"] is not None:
        del values["compile"]["from_steps"]
    return values


def test_a_config_of_an_older_checkpoint_loads(write: Write) -> None:
    """It names what no run of its used, and has since been removed."""
    old = write(f"base: {BASE}\ncorpus: {{path: data/c4, stream: null}}\ntensorboard: true\n")
    assert load_config(old).corpus.path == "data/c4"


class TestOlmoFiles:
    @pytest.mark.parametrize("variant", [str, as_fsdp, as_legacy])
    def test_as_olmo_loads_them(self, write: Write, tmp_path: Path, variant: Callable[[str], str]) -> None:
        path = write(variant(TINY.read_text(encoding="utf8")))
        config = load_config(path)
        assert only_olmo(config) == TrainConfig.load(path, validate_paths=False).asdict()
        config.save(tmp_path / "resolved.yaml")
        assert load_config(tmp_path / "resolved.yaml") == config

    @pytest.mark.parametrize(
        "overrides",
        [
            ["--optimizer.learning_rate=1e-3", "--seed=1", "--seed=2", "--run_name=other"],
            ["--save-overwrite", "model.n_layers=3", "--max_duration=2e10T"],
            ["--data.paths=[a, 'b/${run_name}']", "--optimizer.betas=[0.8,0.99]"],
            ["--wandb=null", "--ddp.find-unused-params", "--optimizer.name=lionw", "--evaluators=[]"],
        ],
    )
    def test_overrides_as_in_olmo(self, overrides: list[str]) -> None:
        expected = TrainConfig.load(TINY, [clean_opt(o) for o in overrides], validate_paths=False).asdict()
        assert only_olmo(load_config(TINY, overrides)) == expected
        assert expected != TrainConfig.load(TINY, validate_paths=False).asdict()

    @pytest.mark.parametrize("steps", ["6:7", "1:10,12:13", "1200:1210"])
    def test_ranges_of_steps_are_no_numbers_of_base_60(self, tmp_path: Path, steps: str) -> None:
        """As YAML 1.1 would read 6:7, on the command line and in the configuration that is saved."""
        config = load_config(TINY, [f"--data.skip_steps={steps}"])
        config.save(tmp_path / "resolved.yaml")
        assert config.data.skip_steps == load_config(tmp_path / "resolved.yaml").data.skip_steps == steps

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

    @pytest.mark.parametrize(
        "of_evaluator", ["{paths: [x.npy, y.npy]}", "{datasets: {a: [x.npy], b: [y.npy]}}"]
    )
    def test_evaluators_give_the_held_out_files(self, write: Write, of_evaluator: str) -> None:
        evaluators = f"[{{label: a, data: {of_evaluator}}}, {{label: b, type: downstream}}]"
        path = write(f"data: {{paths: [t.npy]}}\neval_interval: 7\nevaluators: {evaluators}")
        config = load_config(path)
        assert config.evaluation.paths == ["x.npy", "y.npy"] and config.evaluation.interval == 7
        assert load_config(path, ["--evaluation.interval=3"]).evaluation.interval == 3
        assert load_config(path, ["--evaluation.paths=[z]"]).evaluation.paths == ["z"]

    @pytest.mark.parametrize(
        "of_evaluator", ["{paths: [s3://a/x.npy]}", "{paths: [x.npy], memmap_dtype: uint32}", "{}"]
    )
    def test_files_of_evaluators_that_cannot_be_read_are_left_with_a_warning(
        self, write: Write, caplog: pytest.LogCaptureFixture, of_evaluator: str
    ) -> None:
        path = write(f"data: {{paths: [t.npy]}}\nevaluators: [{{label: a, data: {of_evaluator}}}]")
        config = load_config(path)
        assert config.evaluation.paths is None and config.evaluation.interval is None
        assert "evaluators (held-out loss has evaluation.paths, which are local" in caplog.text

    @pytest.mark.parametrize("how", ["restore_dataloader: false", "reset_trainer_state: true"])
    def test_a_local_load_path_that_starts_anew_gives_the_initial_weights(
        self, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
    ) -> None:
        path = write(f"load_path: {tmp_path}\n{how}")
        config = load_config(path)
        assert config.initial_weights == str(tmp_path) and config.load_path is None
        assert f"load_path {tmp_path} is read as initial_weights" in caplog.text
        config.save(tmp_path / "resolved.yaml")
        assert load_config(tmp_path / "resolved.yaml") == config
        for elsewhere in ("https://host/step9", "none"):
            message = refusal(path, f"--load_path={elsewhere}")
            assert message.startswith(
                f"FILE: load_path: {elsewhere} is not supported: a run goes on with --resume; "
            )
        assert refusal(path, "--load_path=null").startswith(f"FILE: {how.partition(':')[0]}: ")

    def test_a_load_path_that_goes_on_is_refused(self, write: Write, tmp_path: Path) -> None:
        assert refusal(write(f"load_path: {tmp_path}")).startswith("FILE: load_path: ")

    def test_the_environment_variable_that_is_missing_is_named(
        self, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in the YAML of OLMo-1B."""
        Config._register_resolvers()  # another test may have let OLMo replace them by ones that look at no path
        monkeypatch.delenv("SCRATCH", raising=False)
        text = "save_folder: ${path.choose:${oc.env:SCRATCH,no_exist}/here,/none}/${run_name}\nrun_name: a"
        path = write(text)
        assert refusal(path).endswith("; set the environment variable SCRATCH, or --save_folder")
        assert load_config(path, ["--save_folder=x"]).save_folder == "x"
        (tmp_path / "here").mkdir()
        monkeypatch.setenv("SCRATCH", str(tmp_path))
        assert load_config(path).save_folder == f"{tmp_path}/here/a"


class TestOverlays:
    def test_chain_merges_sections_and_replaces_lists(self, write: Write) -> None:
        of_model, paths = "rope: true, d_model: 64, n_heads: 4", "paths: [1, 2, 3]"
        write(f"run_name: a\nmodel: {{{of_model}}}\ndata: {{{paths}}}\ncompile: {{}}", "deep/a.yaml")
        write("base: deep/a.yaml\nmodel: {d_model: 128}\ndata: {paths: [4]}\nseed: 1", "b.yaml")
        text = "base: ../b.yaml\nseed: 2\nsave_folder: runs/${run_name}\ncompile: null"
        config = load_config(write(text, "sub/c.yaml"), ["--run_name=c"])
        assert (config.model.rope, config.model.d_model, config.model.n_heads) == (True, 128, 4)
        assert config.data.paths == ["4"] and config.compile is None
        assert (config.seed, config.save_folder) == (2, "runs/c")

    def test_another_base_on_the_command_line(self, write: Write) -> None:
        other = write("seed: 2\nepoch: 2", "b.yaml")
        config = load_config(write("base: none.yaml\nepoch: 3"), [f"--base={other}"])
        assert (config.seed, config.epoch) == (2, 3)


# Text of a file that would be read in part, or for ever, and part of its refusal.
FILES = {
    "seed: 1\nseed: 2": "found duplicate key seed",
    "base: x.yaml": "its base files form a circle",
    "save_folder: ${run_nam}/x": "save_folder: Interpolation key 'run_nam' not found",
    "positions: {scheem: pose}": "positions.scheem: Key 'scheem' not in 'PositionsConfig'. Did you mean: 'scheme'?",
    "seed: ???": "seed: ??? is left open",
    "data: {paths: [a, '${nowhere}']}": "data.paths[1]: Interpolation key 'nowhere' not found",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_is_refused_in_one_line(write: Write, text: str) -> None:
    message = refusal(write(text))
    assert message.startswith("FILE: ") and FILES[text] in message and "\n" not in message


@pytest.mark.parametrize("name", ["initial_weights", "base", "max_grad_norm"])
def test_an_option_without_a_value_is_not_taken_for_null(name: str) -> None:
    """As --initial_weights=$BEFORE has none where the variable is not set: training would start from scratch."""
    message = refusal(BASE, f"--{name}=")
    assert message == f"FILE: --{name}= has no value, as of a variable that is not set; null stands for none"
    assert load_config(BASE, ["--initial_weights=null"]).initial_weights is None


def test_omegaconfs_limit_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that names ten thousand token files could not be resumed."""
    monkeypatch.setenv("OMEGACONF_MAX_YAML_EXPANDED_NODES", "50")
    load_config(TINY)


class TestIgnoredFields:
    def test_fsdp_only_where_it_was_written(self, write: Write) -> None:
        assert "fsdp" in ignored_fields(load_config(write(as_fsdp(TINY.read_text(encoding="utf8")))))
        assert "fsdp" not in ignored_fields(load_config(TINY))
        assert [*ignored_fields(load_config(BASE, ["--fsdp.precision=mixed"]))] == ["fsdp"]

    def test_each_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        overrides = [
            "torch_profiling=true",
            "fused_loss=true",
            "data.pad_direction=left",
            "model.init_device=meta",
        ]
        config = load_config(BASE, [f"--{override}" for override in overrides])
        assert set(ignored_fields(config)) == {override.split("=")[0] for override in overrides}
        (record,) = caplog.records
        assert all(override.split("=")[0] in record.getMessage() for override in overrides)

    def test_what_gpt_neox_has_its_own_of(self, caplog: pytest.LogCaptureFixture) -> None:
        """Every config for OLMo is one for GPT-NeoX; one line says what of it is then otherwise."""
        load_config(ROOT / "configs" / "pose-c4-1b.yaml", ["--model.family=gpt_neox"])
        assert set(re.findall(r"model\.(\w+)", caplog.records[0].getMessage())) == {
            "mlp_ratio", "activation_type", "layer_norm_type", "include_bias", "bias_for_layer_norm",
            "init_cutoff_factor", "weight_tying",
        }  # fmt: skip
