"""Log-probabilities of a text's tokens against one forward pass, whole or in pieces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny

from qwenjax.errors import InputError
from qwenjax.model import forward
from qwenjax.scoring import perplexity, score_tokens

CONFIG = tiny.config("qwen3", num_hidden_layers=2, use_sliding_window=True, sliding_window=5, max_window_layers=1)
PARAMS = tiny.params(CONFIG)
TOKENS = np.asarray(tiny.tokens("score", 21)).tolist()


@pytest.fixture(scope="module")
def expected() -> Any:
    logits_TV = np.asarray(forward(CONFIG, PARAMS, np.array([TOKENS]))[0], np.float64)
    log_probs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return log_probs_TV[np.arange(20), TOKENS[1:]]


@pytest.mark.parametrize(("length", "piece"), [(21, 512), (21, 7), (17, 7), (2, 7)])
def test_scores_are_those_of_one_forward_pass(expected: Any, length: int, piece: int) -> None:
    scores = score_tokens(CONFIG, PARAMS, TOKENS[:length], piece)
    assert len(scores) == length - 1
    np.testing.assert_allclose(scores, expected[: length - 1], atol=2e-5)


def test_perplexity_is_the_inverse_geometric_mean() -> None:
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)


def test_what_has_no_score_is_refused() -> None:
    for tokens, message in (
        ([5], "tokens: only one token, and the first one has no probability. Give a longer text."),
        ([], "tokens: has no tokens. Give at least one, such as the bos id."),
        ([5, 101], "tokens = 101: is no id of this model, whose vocab_size is 101. Use its own tokenizer."),
    ):
        with pytest.raises(InputError) as caught:
            score_tokens(CONFIG, PARAMS, tokens)
        assert str(caught.value) == message
