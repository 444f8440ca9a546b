"""Recipes: what an experiment is, as strict models, and how a YAML file becomes one.

A recipe is a `RunConfig` (what one training run sees) plus the experiment around it: arms as dotted
differences, seeds, controls, and the comparison declared before the runs. `load_recipe` resolves `defaults:`
inheritance and `--set` overrides; every refusal is one `RecipeError` line.
"""

import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from abrun.errors import RecipeError

BASELINE = "baseline"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
WINDOW = r"all|last [1-9]\d?%|last 100%|steps [1-9]\d*-[1-9]\d*"

Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """Base of every part of a recipe: frozen, unknown keys refused, no type coercion, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Grpo(Section):
    """Group-relative policy optimisation (arXiv:2402.03300), one optimizer step for each rollout batch."""

    type: Literal["grpo"]
    prompts_per_step: Count = 32
    group_size: Count = 8
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2
    advantage_baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    normalize_advantages: bool = True
    loss_reduction: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = "token_mean"
    kl_coefficient: NonNegative = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coefficient: NonNegative = 0.0

    @model_validator(mode="after")
    def _group_has_a_baseline(self) -> Self:
        if self.group_size == 1 and (self.normalize_advantages or self.advantage_baseline != "none"):
            raise ValueError(
                "algorithm.group_size: got 1 with advantages relative to their group, which are then all "
                "zero; use 2 or more, or set advantage_baseline: none and normalize_advantages: false"
            )
        return self


class Sft(Section):
    """Supervised fine-tuning on the task's reference completions."""

    type: Literal["sft"]
    batch_size: Count = 32


class Model(Section):
    """Which weights: a named preset with random weights, or a checkpoint (local folder or hub name)."""

    preset: Literal["qwen2-tiny", "qwen2-wide-vocab", "qwen2.5-1.5b"] | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            got = "neither" if self.preset is None else "both"
            raise ValueError(f"model: got {got} of preset and path; give exactly one (the other null)")
        return self


class Dtensor(Section):
    """PyTorch's own parallelism: FSDP2 over all ranks."""

    type: Literal["dtensor"] = "dtensor"


class Logprobs(Section):
    """How log-probs are computed from hidden states, and a loss of them; see abrun.kernels."""

    impl: Literal["logits", "chunked", "triton"] = "logits"
    chunk_size: Count | None = None  # vocabulary rows; None: as many as the memory budget allows
    memory_budget_mib: Count | None = None  # None: the kernel's own, 512
    one_pass: bool = False  # the loss and both gradients in one pass; for losses known token by token
    head_dtype: Literal["float32"] | None = None

    @model_validator(mode="after")
    def _settings_fit_the_path(self) -> Self:
        dense, fused = self.impl == "logits", "use impl: chunked or triton"
        refusals = [
            (
                dense and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with impl 'logits', which has no chunks; {fused}, "
                "or chunk_size: null",
            ),
            (
                dense and self.memory_budget_mib is not None,
                f"memory_budget_mib: got {self.memory_budget_mib} with impl 'logits', which has none; "
                f"{fused}, or memory_budget_mib: null",
            ),
            (
                dense and self.one_pass,
                "one_pass: got true with impl 'logits', whose dense path has one pass already; "
                f"{fused}, or one_pass: false",
            ),
            (
                self.one_pass and self.chunk_size is not None,
                f"chunk_size: got {self.chunk_size} with one_pass, which holds the whole vocabulary's "
                "logits of some tokens; use memory_budget_mib, or chunk_size: null",
            ),
        ]
        for refused, message in refusals:
            if refused:
                raise ValueError(f"policy.logprobs.{message}")
        return self


class Optimizer(Section):
    """AdamW; weight decay on matrices only, not on norms and biases; the learning rate warms up linearly."""

    learning_rate: Positive = 1e-6
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Positive = 1.0


class Policy(Section):
    """The trained model: where it runs, at which precision, and how it is optimised."""

    backend: Dtensor = Dtensor()
    logprobs: Logprobs = Logprobs()
    optimizer: Optimizer = Optimizer()
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_size: Count | None = None  # sequences a rank; None: the rank's whole share at once
    activation_checkpointing: bool = False


class Rollout(Section):
    """How completions are sampled."""

    engine: Literal["torch"] = "torch"
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 512
    batch_size: Count | None = None  # sequences generated at once on a rank; None: all


class Arithmetic(Section):
    """Generated additions of two numbers from 0 to `max_operand`, verified exactly."""

    type: Literal["arithmetic"]
    max_operand: Annotated[int, Field(ge=1, lt=10**9)] = 99


class Gsm8k(Section):
    """JSON lines with `question` and an `answer` that ends in `#### 42`."""

    type: Literal["gsm8k"]
    path: str


class Jsonl(Section):
    """JSON lines with a prompt and a reference answer, compared mathematically."""

    type: Literal["jsonl"]
    path: str
    prompt_field: str = "prompt"
    answer_field: str = "answer"


class WarmStart(Section):
    """Supervised steps on the task before the runs: done once, shared by all arms and seeds, and cached."""

    steps: Count
    batch_size: Count = 32
    learning_rate: Positive = 1e-3


class Checkpoint(Section):
    """When training state is saved, and how many saves are kept."""

    every: Count = 50
    keep: Count = 2
    final_weights: bool = False  # also keep the trained model, as a Hugging Face checkpoint


class Cluster(Section):
    """What one run occupies. Without GPUs it trains on CPU cores, one thread a rank."""

    nodes: Count = 1
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    cpu_ranks: Count = 1

    @model_validator(mode="after")
    def _one_kind_of_device(self) -> Self:
        if self.gpus_per_node and self.cpu_ranks > 1:
            raise ValueError(
                f"cluster.cpu_ranks: got {self.cpu_ranks} with gpus_per_node {self.gpus_per_node}; "
                "a run trains on GPUs or on CPU cores: drop one of the two"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.cpu_ranks

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Wandb(Section):
    """Mirror of the metrics; WANDB_MODE and the other WANDB_ variables hold as usual."""

    project: str = "abrun"
    entity: str | None = None


class RunConfig(Section):
    """Everything one training run sees. Resolved, it is what `config.json` of a run holds."""

    algorithm: Annotated[Grpo | Sft, Field(discriminator="type")]
    model: Model
    policy: Policy = Policy()
    rollout: Rollout = Rollout()
    task: Annotated[Arithmetic | Gsm8k | Jsonl, Field(discriminator="type")]
    warm_start: WarmStart | None = None
    steps: Count
    checkpoint: Checkpoint = Checkpoint()
    cluster: Cluster = Cluster()
    wandb: Wandb | None = None
    planted_fault: Literal["flipped_advantages"] | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        ranks = self.cluster.ranks
        batch = ("prompts_per_step", "batch_size")[self.algorithm.type == "sft"]
        if getattr(self.algorithm, batch) % ranks:
            raise ValueError(
                f"algorithm.{batch}: got {getattr(self.algorithm, batch)} for {ranks} ranks; "
                f"use a multiple of {ranks}, or other cluster sizes"
            )
        if self.warm_start and self.warm_start.batch_size % ranks:
            raise ValueError(
                f"warm_start.batch_size: got {self.warm_start.batch_size} for {ranks} ranks; "
                f"use a multiple of {ranks}"
            )
        if self.rollout.top_p < 1 and self.policy.logprobs.impl != "logits":
            raise ValueError(
                f"rollout.top_p: got {self.rollout.top_p} with policy.logprobs.impl "
                f"{self.policy.logprobs.impl!r}, which never holds the logits to filter; "
                f"use top_p: 1.0, or impl: logits{' with one_pass: false' * self.policy.logprobs.one_pass}"
            )
        if self.planted_fault and self.algorithm.type != "grpo":
            raise ValueError("planted_fault: only algorithm.type grpo has advantages to flip; drop it")
        return self


class Primary(Section):
    """One declared claim: arms agree on `metric` over `window` within `margin` (verdict.md's T3).

    `margin` is absolute, in units of the transformed metric. `sigma` (over seeds) and `correlation` (between
    paired arms) are assumptions that only the power shown before launch depends on.
    """

    metric: str
    window: str = "last 20%"
    margin: Positive
    transform: Literal["identity", "log", "log_excess"] | None = None  # None: by the metric's name
    sigma: Positive | None = None
    correlation: Annotated[float, Field(gt=-1, lt=1)] = 0.0

    @field_validator("window")
    @classmethod
    def _window_is_readable(cls, window: str) -> str:
        if not re.fullmatch(WINDOW, window):
            raise ValueError(f"got {window!r}; allowed: 'last 20%', 'steps 10-50' or 'all'")
        if window.startswith("steps") and int(window[6:].split("-")[0]) > int(window.split("-")[1]):
            raise ValueError(f"got {window!r}, which ends before it begins; write the smaller step first")
        return window


class Guards(Section):
    """One-sided limits that a treatment must keep; see verdict.md, rule 5."""

    token_mult_prob_error_median: Annotated[float, Field(gt=1)] = 1.05
    token_mult_prob_error_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    step_time_ratio: Positive | None = None
    peak_memory_ratio: Positive | None = None


class Compare(Section):
    """The comparison, declared before the runs and hashed into the experiment at launch."""

    primary: list[Primary] = []
    guards: Guards = Guards()
    step_one_tolerance: Positive | None = None  # relative; None: 3x the A/A deviation or the dtype's rounding


class Controls(Section):
    """`aa_reruns`: baseline runs repeated with their own seed, the noise floor of the machine."""

    aa_reruns: Annotated[int, Field(ge=0, le=1000)] = 0


class Recipe(RunConfig):
    """An experiment: a base run, arms as dotted differences from it, seeds, controls and the comparison."""

    name: str
    arms: dict[str, dict[str, Any]]
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=1000)
    controls: Controls = Controls()
    compare: Compare = Compare()

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not re.fullmatch(NAME, name):
            raise ValueError(f"got {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100")
        return name

    @field_validator("arms")
    @classmethod
    def _arms_have_a_baseline(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        bad = [arm for arm in arms if not re.fullmatch(NAME, arm)]
        if bad:
            raise ValueError(f"got an arm named {bad[0]!r}; allowed: letters, digits, '.', '_' and '-'")
        if BASELINE not in arms or len(arms) < 2:
            raise ValueError(
                f"got {_short(list(arms))}; an experiment needs an arm named 'baseline' and at least one more"
            )
        return arms

    @model_validator(mode="after")
    def _seeds_can_carry_the_claim(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: got {_short(self.seeds)} with a seed twice; every seed once")
        if self.compare.primary and len(self.seeds) == 1:
            raise ValueError(
                "seeds: got one seed with an equivalence margin (compare.primary), which needs the spread "
                "over seeds; give two or more, or compare.primary: [] for the step-one check alone"
            )
        return self

    def run_config(self, arm: str) -> RunConfig:
        """The resolved configuration of one arm. Raises RecipeError where its differences do not fit."""
        base = self.model_dump(include=set(RunConfig.model_fields))
        return _validate(RunConfig, merge(base, nested(self.arms[arm])), f"{self.name}: arms.{arm}")


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file, with its `defaults:` below it and `key=value` overrides on top.

    Raises RecipeError: one line with field, value received, what is allowed, what to do.
    """
    try:
        raw = _read_with_defaults(path, ())
        for override in overrides:
            raw = merge(raw, _parse_override(override))
        arms = raw.get("arms")
        if isinstance(arms, dict):
            raw["arms"] = {
                arm: dotted(change) if isinstance(change, dict) else change for arm, change in arms.items()
            }
    except RecursionError:
        raise RecipeError(f"{path}: nested too deeply to be a recipe; a few levels are enough") from None
    recipe = _validate(Recipe, raw, str(path))
    for arm, change in recipe.arms.items():
        for key in change:
            if key.split(".")[0] not in RunConfig.model_fields:
                raise RecipeError(f"{path}: arms.{arm}.{key}: {_unknown(key.split('.')[0], RunConfig)}")
        recipe.run_config(arm)
    return recipe


def parse_primary(text: str) -> Primary:
    """A claim given as METRIC:WINDOW:MARGIN on the command line."""
    metric, _, rest = text.partition(":")
    window, colon, margin = rest.partition(":")
    try:
        number = float(margin)
    except ValueError:
        number = None
    if not metric or not colon or number is None:
        raise RecipeError(
            f"--primary: got {_short(text)}; allowed: METRIC:WINDOW:MARGIN, "
            "such as 'train/reward:last 20%:0.05'"
        )
    return _validate(Primary, {"metric": metric, "window": window, "margin": number}, "--primary")


def dotted(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        flat.update(dotted(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value})
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        leaf: dict[str, Any] = {last: value}
        for parent in reversed(parents):
            leaf = {parent: leaf}
        tree = merge(tree, leaf)
    return tree


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`, mapping by mapping; a mapping of another `type` replaces the old one."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("type") in (None, old.get("type"))
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


class _Loader(yaml.SafeLoader):
    """YAML as people read it: `1e-6` is a number (YAML 1.2), and a key given twice is refused.

    So are aliases (`*name`): `defaults:` shares values, and a few lines of aliases can mean gigabytes.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases (*name) are not supported: write the value out, or share it through defaults:"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore
        seen: set[str] = set()
        for key in keys:
            readable = isinstance(key, str) and key.isprintable()
            if not readable or key in seen:
                problem = "is given twice" if readable else "is not a line of text"
                raise yaml.MarkedYAMLError(None, None, f"key {_short(key)} {problem}", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{source}{where}: not readable as YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from None


def _read_with_defaults(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    resolved = Path(os.path.realpath(path))
    if resolved in chain:
        raise RecipeError(
            f"{chain[-1]}: defaults: a cycle of recipes ({' > '.join(p.name for p in (*chain, resolved))}); "
            "drop one link"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        asked = f"{chain[-1]}: defaults: " if chain else ""
        raise RecipeError(f"{asked}{path}: no such recipe; check the path") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from None
    raw = _parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: got {_short(raw)}; a recipe is a mapping of keys to values")
    parents = raw.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(
        isinstance(parent, str) and parent.isprintable() and len(parent) < 1000 for parent in parents
    ):
        raise RecipeError(f"{path}: defaults: got {_short(parents)}; allowed: a path or a list of paths")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = merge(merged, _read_with_defaults(path.parent / parent, (*chain, resolved)))
    return merge(merged, raw)


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")) or not key.isprintable():
        raise RecipeError(
            f"--set: got {_short(override)}; allowed: key=value with a dotted key, such as steps=20"
        )
    return nested({key: _parse_yaml(value, f"--set {key}")})


def _validate(model: type[M], raw: Mapping[str, Any], source: str) -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        more = f" (and {len(others)} more)" if others else ""
        raise RecipeError(f"{source}: {_explain(first, model)}{more}") from None


def _explain(error: Any, model: type[BaseModel]) -> str:
    """One pydantic error as field, value received, what is allowed."""
    sections: list[type[BaseModel]] = [model]
    owners = sections
    names: list[str] = []
    for part in error["loc"]:
        chosen = [section for section in sections if _tag(section) == part]
        if len(sections) > 1 and chosen:  # pydantic's name of the union's member: not part of the user's path
            sections = chosen
            continue
        names.append(str(part))
        if isinstance(part, str):
            owners = sections
            fields = [section.model_fields[part] for section in owners if part in section.model_fields]
            sections = _sections(fields[0].annotation) if fields else []
    field = ".".join(names)
    if error["type"] == "extra_forbidden":
        return f"{field}: {_unknown(names[-1], owners[0])}"
    if error["type"] == "missing":
        return f"{field}: missing; add it to the recipe"
    if error["type"] == "union_tag_not_found":
        return f"{field}.type: missing; allowed: {error['ctx'].get('expected_tags') or _tags(sections)}"
    if error["type"] == "union_tag_invalid":
        return f"{field}.type: got {_short(error['ctx']['tag'])}; allowed: {error['ctx']['expected_tags']}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # written above, by a validator of a field or of a section
        return f"{field}: {message}" if message.startswith("got") else message
    allowed = message.removeprefix("Input should be ").split(" to extract fields")[0].split(" or instance")[0]
    allowed = allowed.replace("a valid dictionary or object", "a mapping").replace(
        "a valid dictionary", "a mapping"
    )
    return f"{field}: got {_short(error['input'])}; allowed: {allowed}"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The Section classes inside an annotation such as `A | B | None` or `list[A]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections(part)]


def _tag(section: type[BaseModel]) -> str | None:
    kind = section.model_fields.get("type")
    return get_args(kind.annotation)[0] if kind else None


def _tags(sections: Iterable[type[BaseModel]]) -> str:
    return ", ".join(repr(_tag(section)) for section in sections)


def _unknown(key: str, section: type[BaseModel]) -> str:
    allowed = sorted(section.model_fields)
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}"
    return f"unknown key; {hint}"


def _short(value: Any) -> str:
    """A value as one bounded line, however long or deep it is."""
    bounded = reprlib.Repr()
    bounded.maxlevel, bounded.maxstring, bounded.maxother = 3, 60, 60
    text = bounded.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
