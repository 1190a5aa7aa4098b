import hashlib
import math

import numpy as np
import pytest

from node.data.sources import LETTERS, MarkovLanguage


@pytest.fixture(scope="module")
def language():
    return MarkovLanguage(7)


@pytest.fixture(scope="module")
def text(language):
    return language.generate(400_000)


def numbers_of(text):
    """Row numbers of the text's letters."""
    letters = np.frombuffer(LETTERS, np.uint8)
    return np.argsort(letters)[np.searchsorted(np.sort(letters), text)]


def probabilities(language):
    """Probabilities of each letter after the two letters before it; one row for each pair."""
    return language.counts / language.counts[0].sum()


def cross_entropy(language, text):
    """Mean cross-entropy of the text under the model, in nats a letter, from the third letter
    on."""
    number = numbers_of(text)
    context = number[:-2] * len(LETTERS) + number[1:-1]
    return float(-np.log(probabilities(language)[context, number[2:]]).mean())


def entropy_rate(language):
    """The language's entropy rate in nats a letter, a lower bound of every model's loss: entropies
    of the rows, weighted by how often each context occurs."""
    letters = len(LETTERS)
    entropies = -(probabilities(language) * np.log(probabilities(language))).sum(axis=1)
    often = np.full(letters**2, letters**-2.0)
    for _ in range(1000):  # context (a, b) with letter c becomes (b, c): sum over a
        grid = (often[:, None] * probabilities(language)).reshape(letters, letters, letters)
        often = grid.sum(axis=0).reshape(-1)
    return float(often @ entropies)


def test_the_empirical_cross_entropy_is_the_stated_entropy_rate(language, text):
    assert cross_entropy(language, text) == pytest.approx(entropy_rate(language), abs=0.01)
    assert 0.5 < entropy_rate(language) < math.log(len(LETTERS)) - 1


def test_another_model_does_worse(language, text):
    assert cross_entropy(MarkovLanguage(8), text) > entropy_rate(language) + 1


def test_rows_are_distributions_that_reach_every_letter(language):
    assert np.allclose(probabilities(language).sum(axis=1), 1, atol=0)
    assert probabilities(language).min() > 0


def test_the_same_text_on_every_machine(language):
    text = language.generate(1000)
    assert text.dtype == np.uint8
    assert np.array_equal(text, language.generate(2000)[:1000])
    assert hashlib.sha256(text.tobytes()).hexdigest() == HASH
    assert set(text.tolist()) <= set(LETTERS)


HASH = "84fbad7be3bb5f6334dcc6906233f1e9851ece106d2d90ea37627912cd461e81"
