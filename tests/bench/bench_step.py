"""A whole training step: abrun with each of its levers on and off, and TRL with and without Liger's kernels.

    python -m tests.bench.bench_step --algorithm sft     # one GPU; needs trl and liger-kernel
    python -m tests.bench.bench_step --algorithm grpo    # and vllm
    python -m tests.bench.bench_step --algorithm ppo     # with a value model of its own; TRL has no PPO
    python -m tests.bench.bench_step --algorithm sft --only "all on" "TRL, Liger" --chart runs/step-sft
    python -m tests.bench.bench_step --algorithm sft --only "all on" --set policy.logprobs.impl=chunked
    python -m tests.bench.bench_step --algorithm sft --gpus 2 --lengths mixed --only "all on"
    python -m tests.bench.bench_step --device cpu        # the script's own logic, on a tiny model

All train one folder of random weights (Qwen2.5-1.5B's architecture) in bfloat16 products on the same texts.
SFT: 96 sequences of 512 tokens a step, or of log-normal lengths (`--lengths mixed`: a median of 400 tokens,
at most 4,096), float32 masters, micro-batches as large as `auto` finds to fit on the GPU. GRPO and PPO: 8
prompts of 128 tokens, 64 completions of 512, sampled by vLLM, one update a step, no KL penalty; TRL's weights
then in bfloat16. Random weights end a completion about never, so that all have their full length. abrun:
whole runs of `python -m abrun.trainer`, Triton log-probs throughout; what has another name than "all on"
differs from it by what it is named after. TRL: activation checkpointing, its default.

A candidate is a process of its own, in which some methods are followed from outside. Seconds are those of the
median of three steps after two that compile; a last one tells where they go. Tokens are of sequences that
were trained on, a device. Utilisation is 6 x parameters x tokens that go through the model (a shared prompt's
once) over the seconds of forward and backward passes, over those of the step, and over 989 TFLOP/s (dense
bfloat16 of an H100 or H200). Busy is the share of a step in which the GPU runs a kernel; peaks are those of
training. The chart has the seconds in which the GPU works for each part, rewards the CPU's own, and those in
which it does for none; without a GPU all seconds.
"""

import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from abrun.errors import AbrunError
from abrun.recipe.experiment import parse_stored_recipe
from abrun.recipe.merging import apply_override
from abrun.recipe.run import OwnRunConfig
from abrun.runs.launches import write_config
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.tools.predict.auto import decide_values
from tests.bench.charts import chart
from tests.bench.common import PEAK_FLOPS, make_model, make_parser
from tests.bench.step_parts import STEPS, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    preset: str
    vocab_size: int
    sequences: int  # SFT's, of `length` tokens
    length: int
    prompts: int  # GRPO's and PPO's
    group: int
    prompt_words: int
    completion_tokens: int
    rows: tuple[int, int]  # of a padded microbatch: SFT's and the others'
    packed: tuple[int, int]  # of a packed one, times such rows


SHAPES = {
    "cuda": Shapes(
        preset="qwen2.5-1.5b",
        vocab_size=151_936,
        sequences=96,
        length=512,
        prompts=8,
        group=8,
        prompt_words=128,
        completion_tokens=512,
        rows=(8, 32),
        packed=(8, 1),
    ),
    "cpu": Shapes(
        preset="qwen2-tiny-128",
        vocab_size=128,
        sequences=8,
        length=32,
        prompts=2,
        group=4,
        prompt_words=8,
        completion_tokens=16,
        rows=(2, 4),
        packed=(2, 1),
    ),
}
NOT_COMPILED, NOT_GATHERED = "policy.compile=false", "policy.backend.keep_gathered=false"
TWO_PASSES, RECOMPUTED = "policy.logprobs.one_pass=false", "policy.activation_checkpointing=full"
UNSHARED = "policy.share_prompts=false"
PADDED = (UNSHARED, "policy.packing=false", "policy.micro_batch_tokens=null", "policy.micro_batch_size=ROWS")
LEVERS = {  # what each candidate sets otherwise than the first does
    "all on": (),
    "no compile": (NOT_COMPILED,),
    "Liger for compile": (NOT_COMPILED, "policy.liger=true"),
    "not gathered": (NOT_GATHERED,),
    "two passes": (TWO_PASSES,),
    "smaller microbatches": ("policy.micro_batch_tokens=HALF",),
    "prompts not shared": (UNSHARED,),
    "padded": PADDED,
    "recomputed, full": (RECOMPUTED,),
    "recomputed, selective": ("policy.activation_checkpointing=selective",),
    "torch rollouts": ("rollout.engine=torch",),
    "all off": (NOT_COMPILED, NOT_GATHERED, TWO_PASSES, RECOMPUTED, *PADDED),
}
TRL = {  # whether with Liger's kernels, whether packed; ratios are to the first that was measured
    "TRL, Liger": (True, False),
    "TRL": (False, False),
    "TRL, Liger, packed": (True, True),
    "TRL, packed": (False, True),
}
LEFT_OUT = {  # unless named
    "sft": ("TRL, packed", "recomputed, selective", "prompts not shared", "torch rollouts"),
    "grpo": ("TRL, packed", "recomputed, selective"),
    "ppo": ("TRL, Liger", "TRL, packed", "TRL, Liger, packed", "recomputed, selective"),
}
CANDIDATES = (*TRL, *LEVERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all candidates have in common."""

    algorithm: str
    device: str
    gpus: int
    shapes: Shapes
    overrides: list[str]
    limit_s: float
    work: Path

    @property
    def rows(self) -> int:
        """Of a padded microbatch."""
        return self.shapes.rows[self.algorithm != "sft"]

    def write_texts(self, lengths: str) -> None:
        """As many as a step has: every step is one pass over them."""
        shapes, draws = self.shapes, random.Random(0)
        if self.algorithm == "sft":
            sizes = [shapes.length] * (shapes.sequences * self.gpus)
            if lengths == "mixed":
                usual, most = 400 / 512 * shapes.length, 8 * shapes.length
                sizes = [min(max(int(draws.lognormvariate(math.log(usual), 0.8)), 8), most) for _ in sizes]
            # The end of a sequence is a token, too
            texts = [{"prompt": words(draws, 4), "completion": words(draws, size - 5)} for size in sizes]
        else:
            texts = [
                {"prompt": words(draws, shapes.prompt_words), "answer": "7"}
                for _ in range(shapes.prompts * self.gpus)
            ]
        (self.work / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

    def tree(self, lever: str) -> dict[str, Any]:
        """Return a candidate's run as a recipe states it."""
        shapes, on_gpu, supervised = self.shapes, self.device == "cuda", self.algorithm == "sft"
        longest = shapes.length if supervised else shapes.prompt_words + shapes.completion_tokens
        budget = self.rows * longest * shapes.packed[not supervised]
        drawn = {"prompts_per_step": shapes.prompts * self.gpus, "group_size": shapes.group}
        tree: dict[str, Any] = {
            "algorithm": {
                "type": self.algorithm,
                **({"batch_size": shapes.sequences * self.gpus} if supervised else drawn),
            },
            "model": {"path": str(self.work / "model")},
            "policy": {
                "dtype": "bfloat16" if on_gpu else "float32",
                "compile": on_gpu,
                "packing": True,
                "share_prompts": not supervised,
                "backend": {"type": "dtensor", "keep_gathered": True},
                "micro_batch_tokens": "auto" if on_gpu and supervised else budget,
                "logprobs": {"impl": "triton" if on_gpu else "chunked", "one_pass": True},
                "optimizer": {"learning_rate": 1e-6, "warmup_steps": 0},
            },
            "rollout": {
                "engine": "vllm" if on_gpu and not supervised else "torch",
                "max_new_tokens": shapes.completion_tokens,
            },
            "task": {
                "type": "completions" if supervised else "jsonl",
                "path": str(self.work / "data.jsonl"),
            },
            "steps": STEPS,
            "checkpoint": {"every": 10 * STEPS},
            "cluster": {"gpus_per_node": self.gpus} if on_gpu else {"cpu_ranks": self.gpus},
        }
        for override in (*LEVERS[lever], *self.overrides):
            if "HALF" in override:
                budget = decide_auto(tree)[0]["policy"]["micro_batch_tokens"]
            filled = override.replace("ROWS", str(self.rows)).replace("HALF", str(budget // 2))
            tree = apply_override(tree, filled)
        return tree

    def of_abrun(self, lever: str) -> dict[str, Any]:
        tree, decided = decide_auto(self.tree(lever))
        run = RunDir(Path(tempfile.mkdtemp(dir=self.work)) / "run")
        name = RunName(arm="baseline", seed=0)
        config = OwnRunConfig.model_validate(tree).model_dump(mode="json")
        write_config(run, "x", name, config)
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.gpus}"]
        command = [sys.executable, *(ranks if self.gpus > 1 else []), "-m", "tests.bench.step_abrun"]
        row = finish([*command, json.dumps([str(run.path), self.device])], self.limit_s)
        return row | {"note": "; ".join(filter(None, (decided, row["note"])))}

    def of_trl(self, name: str) -> dict[str, Any]:
        if not importlib.util.find_spec("trl"):
            raise RuntimeError("not measured, trl is not installed")
        liger, packed = TRL[name]
        if self.algorithm == "ppo":
            raise RuntimeError("not measured, TRL has no PPO (1.16)")
        if packed and self.algorithm != "sft":
            raise RuntimeError("not measured, TRL's GRPOTrainer packs nothing")
        if liger and self.device == "cuda" and not importlib.util.find_spec("liger_kernel"):
            raise RuntimeError("not measured, liger-kernel is not installed")
        if liger and self.device == "cpu":
            raise RuntimeError("not measured, Liger's kernels are for GPUs")
        if self.gpus > 1:
            raise RuntimeError("not measured, TRL is compared on one GPU")
        asked = {
            "algorithm": self.algorithm,
            "work": str(self.work),
            "device": self.device,
            "liger": liger,
            "packed": packed,
            "rows": self.rows,
            "length": self.shapes.length,
            "shapes": asdict(self.shapes),
        }
        return finish([sys.executable, "-m", "tests.bench.step_trl", json.dumps(asked)], self.limit_s)


def decide_auto(tree: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a run with its `auto` values as they are decided on this machine, and a note that names them.

    Raises AbrunError if nothing fits.
    """
    experiment = {"name": "x", "arms": {"baseline": {}, "treatment": {}}, "compare": {"claims": []}}
    recipe = parse_stored_recipe({**tree, **experiment, "seeds": [0]}, "bench_step")
    if not recipe.auto_keys:
        return tree, ""
    began_s, values = time.monotonic(), list[str]()
    for key, decision in decide_values(recipe, None, is_local=True).items():
        tree = apply_override(tree, f"{key}={json.dumps(decision['value'])}")
        values.append(f"{key} {decision['value']}")
    return tree, f"{', '.join(values)}, decided in {time.monotonic() - began_s:.0f} s"


def words(draws: random.Random, count: int) -> str:
    """A token each: of digits, as what transformers makes of a tokenizer may split numbers."""
    return " ".join(str(draws.randrange(10)) for _ in range(count))


def finish(command: list[str], limit_s: float) -> dict[str, Any]:
    """The row that a process has printed. Raises RuntimeError, one line."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, told = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Ranks that torchrun has started are in sessions of their own
        for descendant in [*psutil.Process(process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                descendant.kill()
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        told = f"not done after {limit_s:.0f} s"
    rows = [line[4:] for line in out.splitlines() if line.startswith("ROW ")]
    if rows:  # whatever comes of its end
        return json.loads(rows[-1])
    lines = [line for line in told.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
    errors = [line for line in lines if "rror: " in line] or lines
    raise RuntimeError(f"failed: {errors[-1].strip()[:300]}")


HEADER = (
    *("", "s a step", "tokens/s", "of TRL's", "but generation, s", "of TRL's pace"),
    *("util. passes", "of step", "busy", "peak GiB"),
)


def line(name: str, *cells: str) -> str:
    widths = [max(len(title), 7) + 2 for title in HEADER[1:]]
    return f"{name:22s}" + "".join(f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True))


def shown(bench: Bench, name: str, row: dict[str, Any], trl: dict[str, Any] | None) -> str:
    step, rest, on_gpu = row["step"], but_generation(row), bench.device == "cuda"
    paces = [row["tokens"] / bench.gpus / seconds for seconds in (step, rest)]
    theirs = [trl["tokens"] / seconds for seconds in (trl["step"], but_generation(trl))] if trl else []
    ratios = [f"{pace / their:.2f}" for pace, their in zip(paces, theirs, strict=False)] or ["-", "-"]
    passes = sum(row["parts"].get(part, 0.0) for part in ("forward", "head", "backward"))
    flops = 6 * row["parameters"] * row["through"] / bench.gpus
    cells = [f"{step:.3f}", f"{paces[0]:,.0f}", ratios[0], f"{rest:.3f}", ratios[1]]
    cells += [f"{flops / seconds / PEAK_FLOPS:.3f}" if on_gpu else "-" for seconds in (passes, step)]
    cells += [f"{sum(row['busy'].values()) / step:.2f}" if row["busy"] else "-"]
    cells += [f"{row['peak'] / 2**30:.1f}" if on_gpu else "-"]
    return f"{line(name, *cells)}  {row.get('note', '')}".rstrip()


def but_generation(row: dict[str, Any]) -> float:
    return row["step"] - row["parts"].get("generation", 0.0)


def measure(bench: Bench, names: list[str]) -> dict[str, dict[str, float]]:
    """Prints a line for each candidate; returns the parts of those that were measured."""
    found: dict[str, dict[str, Any]] = {}
    print(line(*HEADER))
    for name in names:
        try:
            found[name] = bench.of_trl(name) if name in TRL else bench.of_abrun(name)
        except (RuntimeError, ValueError, AbrunError) as error:  # a recipe may be refused
            print(f"{name:22s}  {' '.join(str(error).split())}", flush=True)
            continue
        trl = next((found[one] for one in TRL if one in found), None)
        print(shown(bench, name, found[name], trl), flush=True)
    return {name: shares(row) for name, row in found.items()}


def main() -> None:
    parser = make_parser(__doc__, devices=list(SHAPES))
    parser.add_argument("--algorithm", choices=("sft", "grpo", "ppo"), default="grpo")
    parser.add_argument("--only", nargs="*", choices=CANDIDATES, help="these candidates")
    parser.add_argument("--set", action="append", default=[], help="key=value for abrun's candidates")
    parser.add_argument("--preset", help="another architecture")
    parser.add_argument("--lengths", choices=("one", "mixed"), default="one", help="of SFT's sequences")
    parser.add_argument("--sequences", type=int, help="of SFT, other than so many a device")
    parser.add_argument("--prompt-words", type=int, help="of GRPO and PPO, a token each; else 128")
    parser.add_argument("--gpus", type=int, default=1, help="of one host; each has as many sequences")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a candidate")
    parser.add_argument("--chart", type=Path, help="PNG and SVG of where the steps go, without the ending")
    asked = parser.parse_args()
    shapes = SHAPES[asked.device]
    given = {"preset": asked.preset, "sequences": asked.sequences, "prompt_words": asked.prompt_words}
    shapes = replace(shapes, **{key: value for key, value in given.items() if value})
    wanted = asked.only or [name for name in CANDIDATES if name not in LEFT_OUT[asked.algorithm]]
    names = [name for name in CANDIDATES if name in wanted]
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(
            algorithm=asked.algorithm,
            device=asked.device,
            gpus=asked.gpus,
            shapes=shapes,
            overrides=asked.set,
            limit_s=asked.limit,
            work=Path(work),
        )
        make_model(shapes.preset, bench.work / "model", asked.device, vocab_size=shapes.vocab_size)
        bench.write_texts(asked.lengths)
        print(f"{asked.algorithm}, {shapes.preset}, {asked.device} x {asked.gpus}", flush=True)
        parts = measure(bench, names)
    for name, of_one in parts.items():
        print(
            f"{name:22s} " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in of_one.items() if seconds)
        )
    if asked.chart and parts:
        chart(parts, asked.chart, "s a step")


if __name__ == "__main__":
    main()
