"""Synthetic tasks in the one training loop: the same losses as a loop of ten lines, whatever runs them."""

import shutil
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from olmo_sparsity.checkpoint import load_model, weights_sha256
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.build import open_training_data, task_of, task_positions
from olmo_sparsity.evaluate.exact_match import TaskEvaluation
from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.model.build import build_model
from olmo_sparsity.positions import COUPLED_SCHEMES, SCHEMES
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import forward_backward, train
from tests.support import tiny, tiny_task
from tests.support.engines import prepared_engine
from tests.support.refusals import refused
from tests.support.slow import slow_but


def rows_of(folder):
    return read_metrics(folder / "metrics.jsonl")


def plain_losses(config, steps):
    """Losses of a plain loop: transformers' model called directly, one sample at a time, PyTorch's AdamW."""
    model = build_model(config).train()
    no_decay = [p for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()]
    decay = [p for p in model.parameters() if not any(p is other for other in no_decay)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    settings = {"betas": tuple(config.optimizer.betas), "eps": config.optimizer.eps}
    optimizer = torch.optim.AdamW(groups, lr=0.0, **settings)
    task, losses = task_of(config), []
    for step in range(steps):
        indices = np.arange(8 * step, 8 * step + 8)
        samples = task.sample("train", config.seed, indices)
        all_ids = task_positions(config).ids(samples, split="train", seed=config.seed, indices=indices)
        sums, count = {"token": 0.0, "id": 0.0}, 0
        for row in range(8):
            end, first = int(samples.lengths[row]), int(samples.response_start[row])
            tokens, ids = torch.tensor(samples.tokens[row, :end]), torch.tensor(all_ids[row, :end])
            neox = model.decoder.model
            embeddings = neox.gpt_neox.embed_in(tokens) + model.id_embedding(ids)
            turned = torch.zeros_like(ids) if config.positions.rotate == "none" else ids
            hidden = neox.gpt_neox(
                inputs_embeds=embeddings[None],
                position_ids=turned[None],
                attention_mask=torch.ones(1, end, dtype=torch.long),
            ).last_hidden_state[0, first - 1 : end - 1]
            sums["token"] += F.cross_entropy(neox.lm_head(hidden), tokens[first:], reduction="sum")
            sums["id"] += F.cross_entropy(model.id_head(hidden), ids[first:], reduction="sum")
            count += end - first
        loss = (sums["token"] + config.positions.id_weight * sums["id"]) / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = 3e-3 * (step + 1) / 2 if step < 2 else 3e-3 * (6 - step - 1) / 4
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), (sums["token"] / count).item(), (sums["id"] / count).item(), rate])
    return losses


@pytest.mark.parametrize("rotate", ["ids", "none"])
def test_the_loop_trains_as_a_plain_loop_over_single_samples(tmp_path, rotate):
    config = tiny_task.config(tmp_path, positions={"rotate": rotate, "id_weight": 0.5})
    train(config)
    logged = [
        [row[name] for name in ("loss_nats", "token_loss_nats", "id_loss_nats", "learning_rate")]
        for row in rows_of(tmp_path / "run")
    ]
    assert logged == [pytest.approx(row, abs=2e-5) for row in plain_losses(config, 6)]
    assert all(row[0] == pytest.approx(row[1] + 0.5 * row[2], abs=1e-5) for row in logged)


def test_a_minimax_step_trains_on_the_lengths_whose_loss_is_largest(tmp_path):
    """The loss of each group, and the gradient of the worst one, from a model that sees the group alone."""
    config = tiny_task.config(tmp_path, "task.length_groups=3", "positions.scheme=contiguous")
    engine, plain = prepared_engine(config), build_model(config).train()
    batch = next(
        islice(open_training_data(config).batches(0), 3, None)
    )  # its largest mean is not its largest sum
    step = forward_backward(engine, batch, 3)
    lengths = [int(row.nonzero().max()) for row in batch.loss_mask]
    assert len(set(lengths)) > 2
    order = sorted(range(8), key=lambda row: (lengths[row], row))
    losses = []
    for rows in (order[:3], order[3:6], order[6:]):
        logits = plain(batch.input_ids[rows], position_ids=batch.position_ids[rows]).logits
        mask = batch.loss_mask[rows]
        losses.append((F.cross_entropy(logits[mask], batch.labels[rows][mask]), int(mask.sum())))
    worst, _ = max(losses, key=lambda term: term[0].item())
    assert worst is not max(losses, key=lambda term: term[0].item() * term[1])[0]
    mean = sum(loss.item() * count for loss, count in losses) / sum(count for _, count in losses)
    assert step == pytest.approx({"loss_nats": worst.item(), "mean_loss_nats": mean}, abs=1e-5)
    worst.backward()
    for parameter, expected in zip(engine.raw_model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, atol=1e-6, rtol=1e-4)


def test_a_run_is_finished_when_it_has_learned_the_longest_training_samples(tmp_path, monkeypatch):
    evaluation_changes = "evaluation.interval=2", "evaluation.windows=4", "evaluation.until=0.5"
    config = tiny_task.config(tmp_path, *evaluation_changes)
    assert train(config).name == "step00000006"  # it has not learned them
    assert all(
        row["exact_match"][0]["exact"] < 2 for row in rows_of(tmp_path / "run") if "exact_match" in row
    )
    longest, exact = config.task.parameters["train_length"][1], iter([1, 2])

    def learns(evaluation, *_):
        assert evaluation.sizes[0][0] == longest
        return {"exact_match": [{"length": longest, "samples": 4, "exact": next(exact)}]}

    monkeypatch.setattr(TaskEvaluation, "run", learns)
    learned = tiny_task.config(tmp_path, *evaluation_changes, f"save_folder={tmp_path / 'learned'}")
    last = train(learned)
    assert last.name == "step00000004"
    assert train(learned, resume=True) == last
    assert rows_of(tmp_path / "learned")[-1]["step"] == 4
    exact = iter([3])
    more = replace(learned, evaluation=replace(learned.evaluation, until=0.9))
    assert train(more, resume=True).name == "step00000006"


def test_the_text_of_a_task_is_verified_and_compared_on_resume(tmp_path):
    texts = (dict.fromkeys(("train", "heldout"), tiny.random_documents(6, 90, seed=n)) for n in (1, 2))
    corpus, other = (tiny.write_corpus(tmp_path / f"{n}", text) for n, text in enumerate(texts))
    lengths = {"train_length": [8, 12], "test_length": [8, 24], "k_train": 2, "k_test": [2]}
    config = tiny_task.config(
        tmp_path,
        task={"name": "planted", "parameters": {"text": str(corpus), **lengths}},
        positions={"scheme": "contiguous", "table_size": None, "skip_probability": 0.0},
        model={"vocab_size": 53},
    )
    train(replace(config, stop_at=3))
    shutil.copytree(corpus, tmp_path / "kept")
    shutil.copytree(other, corpus, dirs_exist_ok=True)
    with refused("the text it is trained on, .* was"):
        train(config, resume=True)
    shutil.copytree(tmp_path / "kept", corpus, dirs_exist_ok=True)
    train(config, resume=True)
    file = corpus / "train-00000.npy"
    file.write_bytes(b"\xff\xff" + file.read_bytes()[2:])
    with refused("train-00000.npy"):
        train(replace(config, save_folder=str(tmp_path / "new")))


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    measured = "evaluation.interval=3", "evaluation.windows=4"
    whole = tiny_task.config(tmp_path, *measured)
    train(whole)
    parts = tiny_task.config(tmp_path, *measured, f"save_folder={tmp_path / 'parts'}")
    train(replace(parts, stop_after=3))
    train(parts, resume=True)
    assert weights_sha256(tmp_path / "parts") == weights_sha256(tmp_path / "run")
    no_speed = {"tokens_per_second": None, "peak_memory_gb": None}
    parted, at_once = ([row | no_speed for row in rows_of(tmp_path / name)] for name in ("parts", "run"))
    assert parted == at_once
    assert [row["step"] for row in rows_of(tmp_path / "run") if "exact_match" in row] == [3, 6]
    with refused(r"task\.parameters\S* was .* and is now"):
        train(tiny_task.config(tmp_path, "task.parameters.train_length=[3,5]"), resume=True)


EVERY_SCHEME = [*SCHEMES, *COUPLED_SCHEMES]


@pytest.mark.parametrize(
    ("family", "scheme"),
    slow_but(
        product(["gpt_neox", "olmo"], EVERY_SCHEME),
        *product(["gpt_neox"], EVERY_SCHEME),
        *product(["olmo"], ["contiguous", "coupled", "predicted"]),
    ),
)
def test_every_scheme_trains_on_either_architecture(tmp_path, family, scheme):
    changes = {"model": tiny_task.OLMO if family == "olmo" else {}, "positions": {"scheme": scheme}}
    config = tiny_task.config(tmp_path, "evaluation.interval=6", "evaluation.windows=2", **changes)
    train(config)
    *steps, measured = rows_of(tmp_path / "run")
    assert steps[-1]["loss_nats"] < steps[0]["loss_nats"]
    assert ("id_loss_nats" in steps[0]) == (scheme == "predicted")
    assert [row["length"] for row in measured["exact_match"]] == [5, 10, 15]
    loaded, stored = load_model(tmp_path / "run")
    assert stored.task == config.task
    assert any("id_embedding" in name for name in loaded.state_dict()) == (scheme in ("coupled", "predicted"))


def test_checkpoints_that_analysis_and_export_cannot_read_are_refused(tmp_path):
    from analysis.open_model import adapter_of, open_model

    tuples = load_config("configs/synthetic/planted-tuples.yaml")
    with refused("a run attends to tuples of tokens"):
        adapter_of(build_model(tuples), "a run")
    train(tiny_task.config(tmp_path))
    with refused("reads position ids in another way than RoPE alone"):
        open_model(tmp_path / "run")
    with refused(r"the export is for OLMo and GPT-NeoX without coupled ids"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
