"""Every task's answer against a solver that reads the text of its prompt, and its ids against ids written by hand."""

import numpy as np
import pytest

from olmo_sparsity.tasks import TASKS, make_task
from olmo_sparsity.tasks.arithmetic import carried
from olmo_sparsity.tasks.scratchpads import VariableAssignment
from tests.olmo_sparsity.tasks.test_tasks import SMALL
from tests.support import tiny
from tests.support.refusals import refused


def texts(task, batch):
    """(prompt, response) of every sample as lists of words, without begin, end and padding."""
    for row in range(len(batch.tokens)):
        words = [task.vocabulary[token] for token in batch.tokens[row]]
        start, end = batch.response_start[row], batch.lengths[row]
        assert set(words[end:]) <= {"<pad>"}
        assert np.flatnonzero(batch.loss_mask[row]).tolist() == [*range(start, end)]
        prompt, response = words[:start], words[start:end]
        if task.end_id is not None:
            assert prompt.pop(0) == "<bos>"
            assert response.pop() == task.vocabulary[task.end_id] == "<eos>"
        assert not {"<pad>", "<bos>", "<eos>"} & {*prompt, *response}
        yield prompt, response


def solve_addition(words):
    assert words[-1] == "="
    a, b = "".join(words[:-1]).split("+")
    return list(str(int(a) + int(b)).zfill(len(a) + 1)[::-1])


def solve_multi_addition(words):
    assert words[-1] == "="
    numbers, total, answer = "".join(words[:-1]).split("+"), 0, []
    for number in numbers:
        total += int(number)
        answer += ["=", *str(total).zfill(len(number) + 1)[::-1]]
    return answer[1:]


def solve_digit_multiplication(words):
    assert words[-1] == "="
    a, digit = "".join(words[:-1]).split("*")
    return list(str(int(a) * int(digit)).zfill(len(a) + 1)[::-1])


def solve_copy(words):
    assert words[-1] == "="
    return words[:-1]


def solve_scratchpad_parity(words):
    assert words[-1] == "="
    return [str(words[:i].count("1") % 2) for i in range(1, len(words))]


def solve_variable_assignment(words):
    *assignments, question, name = words
    assert question == "?"
    known = {assignments[i]: assignments[i + 2] for i in range(0, len(assignments), 3)}
    assert sum(value.isdigit() for value in known.values()) == VariableAssignment.chains
    assert {value for value in known.values() if not value.isdigit()} <= known.keys()
    assert set(assignments[1::3]) == {"="}
    assert len(known) == len(assignments) // 3  # nobody is assigned twice
    steps = []
    while name in known:
        steps += [name, "=", known[name]]
        name = known.pop(name)
    return [*steps, name]


def solve_sparse_parity(words):
    return [str([words[i : i + 2] for i in range(0, len(words), 2)].count(["on", "1"]) % 2)]


def solve_planted(words):
    return [str(sum(int(word) for word in words if word.isdigit()) % 2)]


SOLVERS = {name: globals()[f"solve_{name}"] for name in TASKS}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", TASKS)
def test_the_response_is_what_a_solver_reads_from_the_prompt(name, split):
    task = make_task(name, SMALL[name])
    batch = task.sample(split, 3, range(200))
    assert len(set(task.vocabulary)) == len(task.vocabulary)
    responses = set()
    for prompt, response in texts(task, batch):
        assert response == SOLVERS[name](prompt)
        responses.add(tuple(response))
    assert len(responses) >= (2 if task.end_id is None else 50)
    if batch.label is not None:
        answers = [response[-1] for _, response in texts(task, batch)]
        assert [task.vocabulary[token] for token in batch.label] == answers


@pytest.mark.parametrize("name", TASKS)
def test_largest_id_and_most_tokens_are_those_of_a_sample(name):
    for length in (8, 12):
        parameters = {"k_train": 2, "k_test": (2,)} if "k_train" in dir(TASKS[name]) else {}
        task = make_task(name, {**SMALL[name], **parameters}).at_length(length)
        batch = task.sample("test", 0, [5])
        assert batch.lengths.tolist() == [task.max_tokens(length)]
        largest = None if batch.coupled_ids is None else batch.coupled_ids.max()
        assert largest == task.largest_id(length)
        assert batch.task_length.tolist() == [length]


def changes(task, words, column):
    """The prompts that differ from ``words`` in one column, by a token of the same kind."""
    kinds = {"sparse_parity": [{"0", "1"}], "planted": [{"0", "1"}, set("abcdefgh")]}[task.name]
    for kind in kinds:
        for other in kind - {words[column]} if words[column] in kind else ():
            yield [*words[:column], other, *words[column + 1 :]]


@pytest.mark.parametrize("name", ["sparse_parity", "planted"])
def test_the_planted_columns_are_those_that_decide_the_label(name):
    task, solve = make_task(name, SMALL[name]), SOLVERS[name]
    batch = task.sample("test", 0, range(40))
    for row, (prompt, response) in enumerate(texts(task, batch)):
        decisive = [
            column
            for column in range(len(prompt))
            if any(solve(changed) != response for changed in changes(task, prompt, column))
        ]
        assert decisive == [column for column in batch.planted[row] if column >= 0]
        assert (batch.planted[row, len(decisive) :] == -1).all()


def test_text_in_the_background_is_that_of_the_split(tmp_path):
    """Every prompt is a stretch of the right file wherever nothing is planted; files are ended by EOS, id 0."""
    documents = {"train": [[*range(1, 41)] * 3], "heldout": [[*range(41, 50)] * 20]}
    corpus = tiny.write_corpus(tmp_path / "corpus", documents)
    options = {"text": str(corpus), "test_length": (20, 60)}
    task = make_task("planted", {**options, "num_planted": 3, "k_train": 3, "k_test": (2,)})
    assert len(task.vocabulary) == 1 + 50 + 3
    seen = set()
    for split, name in (("train", "train"), ("test", "heldout")):
        text = [*documents[name][0], tiny.EOS]
        batch = task.sample(split, 0, range(50))
        for tokens, length, planted, label in zip(
            batch.tokens, batch.task_length, batch.planted, batch.label, strict=True
        ):
            columns = [column for column in planted if column >= 0]
            assert (tokens[columns] > 50).all() and label - 51 == (tokens[columns] - 51).sum() % 3
            kept = [column for column in range(length) if column not in columns]
            assert max(tokens[kept]) <= 50
            starts = [
                start
                for start in range(len(text) - length + 1)
                if all(tokens[column] - 1 == text[start + column] for column in kept)
            ]
            assert starts
            seen.add((split, starts[0]))
    assert len(seen) > 20
    with refused("has 121 tokens in train, too few for samples of 150"):
        make_task("planted", {**options, "train_length": (150, 150)})


@pytest.mark.parametrize(("function", "solve"), [("sum", lambda values: sum(values) % 5), ("max", max)])
def test_label_functions(function, solve):
    task = make_task("planted", {"num_planted": 5, "label_function": function})
    batch = task.sample("train", 0, range(200))
    for prompt, response in texts(task, batch):
        assert int(response[0]) == solve([int(word) for word in prompt if word.isdigit()])


def test_long_carries():
    """Random digits rarely carry far, so sums of 9 are made frequent here."""
    generator = np.random.default_rng(0)
    sums = generator.integers(91, size=(300, 30))
    sums = np.where(generator.random(sums.shape) < 0.9, 9, sums)
    for row, digits in zip(sums.tolist(), carried(sums), strict=True):
        number = sum(value * 10**place for place, value in enumerate(row))
        assert "".join(map(str, digits[::-1])) == str(number).zfill(30)[-30:]


TWO = {"k_train": 2, "k_test": (2,)}
PARAMETERS = {
    **dict.fromkeys(["sparse_parity", "planted", "multi_addition"], TWO),
    "variable_assignment": {"num_variables": 8, "train_length": (1, 2), "test_length": (1, 2)},
}
SHOWN = {  # name and length of a sample: prompt, response, ids or planted columns
    ("addition", 3): (
        "<bos> 5 8 2 + 3 6 0 =", "2 4 9 0 <eos>",
        {"coupled_ids": [0, 4, 3, 2, 1, 4, 3, 2, 1, 2, 3, 4, 5, 0]},
    ),
    ("multi_addition", 2): (
        "<bos> 1 7 + 9 4 =", "7 1 0 = 1 1 1 <eos>",
        {
            "coupled_ids": [0, 3, 2, 1, 3, 2, 1, 2, 3, 4, 1, 2, 3, 4, 0],
            "second_ids": [0, 1, 1, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2, 0],
        },
    ),
    ("digit_multiplication", 3): (
        "<bos> 1 3 4 * 3 =", "2 0 4 0 <eos>", {"coupled_ids": [0, 4, 3, 2, 1, 2, 1, 2, 3, 4, 5, 0]}
    ),
    ("copy", 4): ("<bos> 5 1 3 1 =", "5 1 3 1 <eos>", {"coupled_ids": [0, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0]}),
    ("scratchpad_parity", 5): (
        "<bos> 0 1 0 1 0 =", "0 1 1 0 0 <eos>", {"coupled_ids": [0, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0]}
    ),
    ("sparse_parity", 8): ("on 0 off 1 on 0 off 0", "0", {"planted": [1, 5]}),
    ("planted", 8): (
        "c e d 0 b 1 e d", "1", {"coupled_ids": [1, 2, 3, 9, 5, 9, 7, 8, 9], "planted": [3, 5]}
    ),
    ("variable_assignment", 2): (
        "<bos> b = 6 e = 9 f = b g = a h = e a = b ? a", "a = b b = 6 6 <eos>",
        {"coupled_ids": [0, *range(2, 20), 1, 1, 17, 18, 19, 2, 3, 4, 4, 0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "length"), SHOWN)
def test_one_sample_of_each_task_checked_by_hand(name, length):
    """Written out so that a later version which draws other samples for the same seed is noticed."""
    task = make_task(name, PARAMETERS.get(name, {})).at_length(length)
    batch = task.sample("test", 0, [0, 1])
    prompt, response, columns = SHOWN[name, length]
    words = [task.vocabulary[token] for token in batch.tokens[0, : batch.lengths[0]]]
    assert words == [*prompt.split(), *response.split()]
    assert batch.response_start[0] == len(prompt.split())
    for column, values in columns.items():
        assert getattr(batch, column)[0, : len(values)].tolist() == values
