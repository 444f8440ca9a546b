"""Arguments, tables, timing and models that the benchmarks share."""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from abrun.launch.supervisor import print_line

PEAK_FLOPS = 989e12  # dense bfloat16 of an H100 or H200, by its data sheet


def make_parser(doc: str | None, *, devices: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring as its help; the first of `devices` is the default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if devices:
        parser.add_argument("--device", choices=devices, default=devices[0])
    return parser


class PrintedLines:
    """An observer of a launch that prints its lines."""

    say = staticmethod(print_line)

    def follow(self, experiment_dir: Path) -> None:
        pass

    def tick(self) -> None:
        pass


def markdown_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def heading(*titles: object) -> str:
    """Return the first two lines of a Markdown table."""
    return f"{markdown_row(*titles)}\n{markdown_row(*['---'] * len(titles))}"


def print_table(title: str, columns: Iterable[object], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table as its rows come; their first cell is a name, and rates have three digits."""
    print(f"\n**{title}**\n\n{heading('', *columns)}")
    for row in rows:
        cells = (f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row)
        print(markdown_row(*cells), flush=True)


def seconds_of(
    call: Callable[[], Any],
    repeats: int,
    *,
    sync: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of each of `repeats` calls; `sync` waits for a device before and after."""
    seconds = []
    for _ in range(repeats):
        sync()
        began_s = clock()
        call()
        sync()
        seconds.append(clock() - began_s)
    return seconds


def seconds_of_children() -> float:
    """Return the processor's seconds of all processes that have ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def sync_of(device: str) -> Callable[[], Any]:
    """Return a call that waits for a device."""
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def make_model(preset: str, folder: Path, device: str, *, vocab_size: int = 100) -> None:
    """Write random weights of a preset's architecture, with a tokenizer that has a token a word.

    Raises RuntimeError.
    """
    from abrun.recipe.policy import Model
    from abrun.trainer.models.sources import preset_config

    write_weights(preset_config(Model.model_validate({"preset": preset})), folder, device)
    write_tokenizer(folder, vocab_size)


def write_weights(architecture: Any, folder: Path, device: str) -> None:
    """Write random weights in bfloat16 with their transformers configuration.

    On a GPU a process of its own does it, which leaves none of the memory in use. Raises RuntimeError.
    """
    if device == "cpu":
        _write_weights(architecture, folder, device)
        return
    arguments = (architecture, folder, device)
    process = multiprocessing.get_context("spawn").Process(target=_write_weights, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the model was not written, exit code {process.exitcode}")


def _write_weights(architecture: Any, folder: Path, device: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        network: Any = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    network.save_pretrained(folder)


def write_tokenizer(folder: Path, vocab_size: int, *, chat_template: str | None = None) -> None:
    """Write a tokenizer that has a token a word, of which all but three are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(str(number) for number in range(vocab_size - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=chat_template,
    ).save_pretrained(folder)
