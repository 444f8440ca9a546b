"""Completions of one run, or of two runs side by side, for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from abrun.present.tables import Table, columns
from abrun.recorded.samples import SamplePair
from abrun.redaction import display_safe
from abrun.runs.samples import Sample


def render_samples(names: Sequence[str], pairs: Sequence[SamplePair]) -> RenderableType:
    """Return the completions of one or two runs with these names."""
    return Group(*_sample_renderables(names, pairs))


def _sample_renderables(names: Sequence[str], pairs: Sequence[SamplePair]) -> Iterator[RenderableType]:
    for pair in pairs:
        yield Text(f"step {pair.step}: {display_safe(' '.join(pair.prompt.split()))}", style="bold")
        samples = (pair.left, pair.right)[: len(names)]
        rows = [
            [Text("not kept" if sample is None else _clean_lines(sample.text)) for sample in samples],
            [Text("" if sample is None else _sample_facts(sample), style="dim") for sample in samples],
        ]
        yield Table(columns(*names, fold=True), rows).to_rich(padding=(0, 1), expand=len(names) > 1)
        yield Text("")


def _sample_facts(sample: Sample) -> str:
    facts = [
        "reward unknown" if sample.reward is None else f"reward {sample.reward:.3g}",
        "" if sample.logprob_error is None else f"log-prob error {sample.logprob_error:.2g}",
        "" if sample.num_tokens is None else f"{sample.num_tokens} tokens",
        "truncated" if sample.truncated else "",
    ]
    return ", ".join(filter(None, facts))


def _clean_lines(text: str) -> str:
    return "\n".join(display_safe(line) for line in text.splitlines())
