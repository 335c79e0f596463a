"""/metrics pages: samples, differences over engines and versions, and pages that can't be subtracted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qwenjax.errors import InputError
from roofline.vllm_metrics import FLOPS, CounterDelta, load_counter_delta, read_samples

PAGES = Path(__file__).resolve().parent / "data" / "vllm"
BEFORE, AFTER = (PAGES / name for name in ("before.txt", "after.txt"))


@pytest.fixture
def delta_of(tmp_path: Path) -> Callable[..., CounterDelta]:
    def subtract(before: str, after: str, model: str = "") -> CounterDelta:
        paths = tmp_path / "before", tmp_path / "after"
        for path, text in zip(paths, (before, after), strict=True):
            path.write_text(text)
        return load_counter_delta(*paths, model=model)

    return subtract


def test_the_difference_of_two_pages() -> None:
    delta = load_counter_delta(BEFORE, AFTER)
    assert delta == CounterDelta(
        flops=4.0 * 17509550915584,
        read_bytes=4.0 * 3641989607424,
        write_bytes=4.0 * 5065179136,
        prompt_tokens=4096,
        output_tokens=1024,
        requests=4,
        steps=1024,
        cached_tokens=0,
        preemptions=0,
        draft_tokens=0,
        engines=("0",),
        model_name="Qwen/Qwen2.5-7B-Instruct",
    )


def test_samples_of_a_page() -> None:
    text = '# HELP a b\na 1\nb{x="1",y="a \\"quoted\\" } one"} +Inf 1700000000\nc{} 2.5e+09 # {id="1"} 1\n\n# EOF\n'
    samples = read_samples(text)
    assert samples["a", ()] == 1
    assert samples["b", (("x", "1"), ("y", 'a \\"quoted\\" } one'))] == float("inf")
    assert samples["c", ()] == 2.5e9


def test_engines_add_up_and_models_are_chosen(delta_of: Callable[..., CounterDelta]) -> None:
    """Two data-parallel engines of one model; another model on the same server stays out."""
    before, after = BEFORE.read_text(), AFTER.read_text()
    second, other = ('engine="1"', "Qwen/Qwen3-8B")
    pages = [page + page.replace('engine="0"', second) for page in (before, after)]
    twice = delta_of(*pages)
    assert (twice.engines, twice.flops, twice.requests) == (("0", "1"), 8.0 * 17509550915584, 8)
    mixed = [page + page.replace("Qwen/Qwen2.5-7B-Instruct", other) for page in (before, after)]
    assert delta_of(*mixed, "qwen2.5-7b-instruct").flops == 4.0 * 17509550915584
    with pytest.raises(
        InputError, match=r"holds several models \(Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-8B\)\. Give MODEL"
    ):
        delta_of(*mixed, "llama")


def test_counters_that_a_version_lacks(delta_of: Callable[..., CounterDelta]) -> None:
    def old(text: str) -> str:
        kept = [line for line in text.splitlines() if "iteration_tokens" not in line and "read_bytes" not in line]
        return "\n".join(kept).replace("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count")

    delta = delta_of(old(BEFORE.read_text()), old(AFTER.read_text()))
    assert (delta.steps, delta.read_bytes, delta.requests) == (None, None, 4)


def test_a_counter_that_appears_later_starts_at_zero(delta_of: Callable[..., CounterDelta]) -> None:
    before = "\n".join(line for line in BEFORE.read_text().splitlines() if "write_bytes" not in line)
    assert delta_of(before, AFTER.read_text()).write_bytes == 7.0 * 5065179136


def _without(name: str) -> Callable[[str], str]:
    return lambda text: "\n".join(line for line in text.splitlines() if name not in line)


def _restarted(text: str) -> str:
    return text.replace(" 3072.0", " 99999.0")


CURL = "Give what `curl http://HOST:PORT/metrics` prints."


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda b, a: (a, b),
            "--vllm-metrics BEFORE AFTER: every counter goes backwards. Give BEFORE first, then AFTER.",
        ),
        (
            lambda b, a: (b, b),
            "--vllm-metrics BEFORE AFTER: vllm:generation_tokens_total doesn't move: nothing finished between them. "
            "Take AFTER once some requests are done.",
        ),
        (
            lambda b, a: (_restarted(b), a),
            "--vllm-metrics BEFORE AFTER: vllm:prompt_tokens_total falls by 92,831: the server started anew between "
            "them. Take both pages from one run of the server.",
        ),
        (
            lambda b, a: (b, a.replace(" 7168.0", " +Inf")),
            "--vllm-metrics BEFORE AFTER: vllm:prompt_tokens_total is not a finite number. Take the pages again.",
        ),
        (lambda b, a: ("x 1\n", a), f"--vllm-metrics BEFORE: has no counters of vLLM's. {CURL}"),
        (lambda b, a: (b, ""), f"--vllm-metrics AFTER: has no counters of vLLM's. {CURL}"),
        (
            lambda b, a: (b, "404 page not found"),
            f"--vllm-metrics AFTER = '404 page not found': line 1 is not a sample of a Prometheus page. {CURL}",
        ),
        (
            lambda b, a: (_without(FLOPS)(b), a),
            f"--vllm-metrics BEFORE: has no counter {FLOPS}. Start vLLM with --enable-mfu-metrics.",
        ),
        (
            lambda b, a: (b, _without("prompt_tokens_total")(a)),
            "--vllm-metrics AFTER: has no counter vllm:prompt_tokens_total. Give the whole page.",
        ),
        (
            lambda b, a: (b, a.replace(f"{7 * 17509550915584}.0", f"{3 * 17509550915584}.0")),
            f"--vllm-metrics BEFORE AFTER: {FLOPS} doesn't move although tokens were made. "
            "Start vLLM with --enable-mfu-metrics, without which it stays where it is.",
        ),
    ],
)  # fmt: skip
def test_pages_that_can_not_be_subtracted(
    change: Callable[[str, str], tuple[str, str]], text: str, delta_of: Callable[..., CounterDelta], tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        delta_of(*change(BEFORE.read_text(), AFTER.read_text()))
    paths = {"BEFORE": str(tmp_path / "before"), "AFTER": str(tmp_path / "after")}
    for name, path in paths.items():
        text = text.replace(f" {name}", f" {path}", 1) if text.startswith("--vllm-metrics") else text
    assert str(caught.value) == text
