"""Makes dumps.zip: dumps of other frameworks' own loss code, as it is and with injected faults.

python -m tests.tools.audit.make_dumps MIRRORS   # with trl importable, and torch

MIRRORS is a folder of git directories, OWNER+NAME/repo, of the repositories in SOURCES: their functions are
read from the newest commit there and run, and nothing of them is kept but numbers. `sources` of the archive's
index.json has commits and versions. Every fault replaces an argument of that code, or one line around it,
after the report that it names.
"""

import __future__

import ast
import importlib
import inspect
import json
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abrun.tools.audit.dump import write_dump
from abrun.tools.audit.settings import ALGORITHMS
from tests.tools.audit import cases

ARCHIVE = Path(__file__).with_name("dumps.zip")
SOURCES = {
    "verl": "volcengine+verl",
    "skyrl": "NovaSky-AI+SkyRL",
    "openrlhf": "OpenRLHF+OpenRLHF",
    "nemo": "NVIDIA-NeMo+RL",
    "liger": "linkedin+Liger-Kernel",
    "torchtitan": "pytorch+torchtitan",
    "prime": "PrimeIntellect-ai+prime-rl",
}
VOCABULARY = 11


class Mirrors:
    """The other frameworks' code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sources = {name: self._git(name, "rev-parse", "HEAD").strip() for name in SOURCES}

    def _git(self, name: str, *words: str) -> str:
        command = ["git", f"--git-dir={self._folder / SOURCES[name] / 'repo'}", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def load(self, name: str, path: str, wanted: tuple[str, ...], **namespace: Any) -> SimpleNamespace:
        """Return functions and classes of a module, which see `namespace` instead of its imports."""
        tree = ast.parse(self._git(name, "show", f"HEAD:{path}"))
        nodes: list[Any] = [node for node in tree.body if getattr(node, "name", None) in wanted]
        assert len(nodes) == len(wanted), (wanted, [node.name for node in nodes])
        for node in nodes:
            node.decorator_list = [  # registries and type checkers
                of for of in node.decorator_list if ast.unparse(of) in ("torch.no_grad()", "dataclass")
            ]
        module = ast.Module(nodes, [])
        names = {"torch": torch, "np": np, "nn": torch.nn, "F": torch.nn.functional, **namespace}
        code = compile(module, f"{name}/{path}", "exec", __future__.annotations.compiler_flag)
        exec(code, names)
        return SimpleNamespace(**{key: names[key] for key in wanted})


def make_batch(seed: int, *, rows: int, width: int, group: int, dtype: torch.dtype, prompt: int) -> Any:
    """Return a micro-batch of completions, right-padded after `prompt` positions of prompts, left-padded."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator)

    lengths = torch.randint(2, width - prompt + 1, (rows,), generator=generator)
    prompts = torch.randint(1, prompt + 1, (rows,), generator=generator) if prompt else torch.zeros(rows)
    places = torch.arange(width)[None]
    attention = (places >= prompt - prompts[:, None]) & (places < prompt + lengths[:, None])
    prompt_mask = (places < prompt) & attention
    inference = -torch.rand(rows, width, generator=generator) * 3 - 0.05
    old = inference + noise(0.05)
    current = old + noise(0.2)
    reference = current + noise(0.3)
    rewards = torch.randint(0, 2, (rows, 2), generator=generator).float()
    rewards[:, 1] += torch.rand(rows, generator=generator)
    return SimpleNamespace(
        token_ids=torch.randint(0, VOCABULARY, (rows, width), generator=generator),
        attention_mask=attention,
        prompt_mask=prompt_mask,
        token_mask=attention & ~prompt_mask,
        reward_parts=rewards,
        rewards=rewards @ torch.tensor([1.0, 0.5]),
        group_ids=torch.arange(rows) // group,
        inference_logprobs=inference.to(dtype),
        old_logprobs=old.to(dtype),
        trainer_logprobs=current.to(dtype).requires_grad_(),
        reference_logprobs=reference.to(dtype),
        entropy=(torch.rand(rows, width, generator=generator) + 0.2).to(dtype),
        logits=torch.randn(rows, width, VOCABULARY, generator=generator) * 2,
    )


INPUTS = ("token_ids", "attention_mask", "prompt_mask", "token_mask", "reward_parts", "rewards", "group_ids")
LOGPROBS = ("inference_logprobs", "old_logprobs", "trainer_logprobs", "reference_logprobs")


class Frameworks:
    """A step of each framework: each method returns the loss [] of a batch, with what else it computes."""

    def __init__(self, mirrors: Mirrors) -> None:
        load = mirrors.load
        self._trl = importlib.import_module("trl.trainer.grpo_trainer")
        functional = load("verl", "verl/utils/torch_functional.py", ("masked_sum", "masked_mean"))
        self._verl = load(
            "verl",
            "verl/trainer/ppo/core_algos.py",
            (
                *("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage", "agg_loss"),
                *("compute_policy_loss_vanilla", "compute_policy_loss_gspo", "kl_penalty"),
                *("kl_penalty_forward", "compute_policy_loss_cispo"),
            ),
            verl_F=functional,
            defaultdict=defaultdict,
            AlgoConfig=type("AlgoConfig", (), {}),
            ActorConfig=_Config,
        )
        utils = load(
            "skyrl", "skyrl/backends/skyrl_train/utils/torch_utils.py", ("masked_mean", "safe_exp_delta")
        )
        correction = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
        names = ("apply_off_policy_correction", "compute_off_policy_correction", "compute_tis_ratio")
        off_policy = load(
            "skyrl", correction, (*names, "off_policy_correction_enabled", *_SKYRL_MASKS), **vars(utils)
        )
        self._skyrl = load(
            "skyrl",
            "skyrl/backends/skyrl_train/utils/ppo_utils.py",
            (
                *("ppo_policy_loss", "gspo_policy_loss", "reduce_loss", "compute_grpo_outcome_advantage"),
                *("apply_loss_reduction_to_advantages_minibatch", "compute_approx_kl"),
            ),
            defaultdict=defaultdict,
            **vars(utils),
            **vars(off_policy),
        )
        masked = load("openrlhf", "openrlhf/models/utils.py", ("masked_mean",))
        self._openrlhf = load(
            "openrlhf",
            "openrlhf/models/loss.py",
            ("aggregate_loss", "PolicyLoss", "SFTLoss", "DPOLoss"),
            **vars(masked),
        )
        self._nemo_utils = load(
            "nemo",
            "nemo_rl/algorithms/utils.py",
            ("calculate_baseline_and_std_per_prompt", "calculate_kl", "masked_mean"),
        )
        interfaces = SimpleNamespace(
            LossType=SimpleNamespace(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence"),
            LossInputType=SimpleNamespace(LOGPROB="logprob"),
            MetricNormalizer=SimpleNamespace(TOKENS="tokens", SEQUENCES="sequences", NONE="none"),
        )
        self._nemo = load(
            "nemo",
            "nemo_rl/algorithms/loss/loss_functions.py",
            ("ClippedPGLossConfig", "ClippedPGLossFn"),
            BaseModel=_Model,
            LossFunction=object,
            **vars(interfaces),
            **vars(self._nemo_utils),
        )
        self._nemo_advantages = load(
            "nemo",
            "nemo_rl/algorithms/advantage_estimator.py",
            ("GRPOAdvantageEstimator",),
            **vars(self._nemo_utils),
        )
        self._liger = load(
            "liger",
            "src/liger_kernel/chunked_loss/grpo_loss.py",
            ("k3_loss_fn", "clip_coef_fn", "LigerFusedLinearGRPOFunction"),
            LigerFusedLinearPPOBase=_LigerBase,
        )
        self._titan = load(
            "torchtitan",
            "torchtitan/experiments/rl/losses/dapo.py",
            ("DAPOLoss",),
            BaseLoss=type("BaseLoss", (), {"Config": object}),
            dataclass=dataclass,
            _MAX_LOG_RATIO=10.0,
            compute_logprobs=_logprobs_of,
        )
        self._prime = load(
            "prime",
            "src/prime_rl/trainer/rl/loss.py",
            ("ce_loss_fn", "LossOutputs", "_safe_mean"),
            dataclass=dataclass,
        )

    # --- verl ---

    def verl(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        mask = faults.get("mask", batch.token_mask).to(batch.trainer_logprobs.dtype)
        index = faults.get("index", batch.group_ids).numpy()
        scores = torch.zeros(mask.shape)
        scores[:, -1] = faults.get("rewards", batch.rewards)
        estimate = self._verl.compute_grpo_outcome_advantage
        by_std = settings.get("advantage_std", "group") != "none"
        options: dict[str, Any] = {"norm_adv_by_std_in_grpo": by_std}
        if settings.get("baseline") == "leave_one_out":
            estimate, options = self._verl.compute_rloo_outcome_advantage, {}
        advantages, _ = estimate(scores, torch.ones_like(scores), index, **options)
        used = faults.get("advantages", lambda of: of)(advantages).to(mask.dtype)
        old = faults.get("old", batch.old_logprobs)
        modes = {
            "token_mean": "token-mean",
            "sequence_mean": "seq-mean-token-mean",
            "document_sum": "seq-mean-token-sum",
            "sequence_sum_constant": "seq-mean-token-sum-norm",
        }
        info = {
            "dp_size": settings.get("loss_scale", 1),
            "batch_num_tokens": settings.get("num_tokens"),
            "global_batch_size": settings.get("num_sequences"),
            "loss_scale_factor": None,
        } | faults.get("info", {})
        config = _Config(
            clip_ratio=0.2,
            clip_ratio_low=settings.get("clip_low", 0.2),
            clip_ratio_high=settings.get("clip_high", 0.2),
            clip_ratio_c=settings.get("dual_clip", 3.0),
            global_batch_info=info,
        )
        compute = self._verl.compute_policy_loss_vanilla
        if settings.get("ratio") == "sequence":
            compute = self._verl.compute_policy_loss_gspo
        mode = modes[faults.get("aggregation", settings["aggregation"])]
        weights = None
        if "importance_correction" in settings:
            gap = batch.old_logprobs - batch.inference_logprobs
            weights = gap.exp().clamp(max=settings["importance_high"])
        current = faults.get("current", batch.trainer_logprobs)
        loss, metrics = compute(
            old, current, used, mask, mode, config, None if faults.get("no_weights") else weights
        )
        if settings.get("kl_coefficient"):
            arguments = faults.get("kl", lambda c, r: (c, r))(
                batch.trainer_logprobs, batch.reference_logprobs
            )
            kind = faults.get("estimator", settings.get("kl_estimator", "k3"))
            penalty = self._verl.kl_penalty(*arguments, kind)
            penalty = self._verl.agg_loss(penalty, mask, mode, **info)
            loss = loss + faults.get("kl_factor", 1) * settings["kl_coefficient"] * penalty
        return {
            "loss": loss,
            "advantages": advantages[:, 0],
            "importance_weights": weights,
            "metrics": {"clip_fraction": metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]},
        }

    # --- SkyRL ---

    def skyrl(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        mask = faults.get("mask", batch.token_mask).to(batch.trainer_logprobs.dtype)
        scores = torch.zeros(mask.shape)
        scores[:, -1] = batch.rewards
        advantages, _ = self._skyrl.compute_grpo_outcome_advantage(
            scores,
            torch.ones_like(scores),
            batch.group_ids.numpy(),
            grpo_norm_by_std=settings.get("advantage_std", "group") != "none",
        )
        names = {"sequence_sum_constant": "seq_mean_token_sum_norm"}
        scaled = self._skyrl.apply_loss_reduction_to_advantages_minibatch(
            advantages.to(mask.dtype),
            mask,
            names.get(settings["aggregation"], settings["aggregation"]),
            micro_batch_size=len(mask),
            max_seq_len=settings.get("max_completion_tokens", 0),
            prompt_boundaries=_boundaries(batch.group_ids),
        )
        config = SimpleNamespace(
            policy_loss_type="dual_clip" if "dual_clip" in settings else "regular",
            eps_clip_low=settings.get("clip_low", 0.2),
            eps_clip_high=settings.get("clip_high", 0.2),
            clip_ratio_c=settings.get("dual_clip"),
            loss_reduction=settings["aggregation"],
            off_policy_correction=_Defaults(
                tis_ratio_type={"truncated": "token", "sequence_product": "sequence"}.get(
                    settings.get("importance_correction", "")
                ),
                token_tis_ratio_clip_high=settings.get("importance_high"),
                sequence_tis_ratio_clip_high=settings.get("importance_high"),
            ),
        )
        compute = (
            self._skyrl.gspo_policy_loss
            if settings.get("ratio") == "sequence"
            else self._skyrl.ppo_policy_loss
        )
        rollout = batch.inference_logprobs if "importance_correction" in settings else None
        rollout = None if faults.get("no_weights") else rollout
        loss, _ = compute(batch.trainer_logprobs, batch.old_logprobs, scaled, config, mask, rollout)
        return {"loss": loss * settings.get("loss_scale", 1), "advantages": advantages[:, 0]}

    # --- OpenRLHF ---

    def openrlhf(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        mask = faults.get("mask", batch.token_mask).to(batch.trainer_logprobs.dtype)
        info = {
            "dp_size": settings.get("loss_scale", 1),
            "batch_num_tokens": settings.get("num_tokens"),
            "global_batch_size": settings.get("num_sequences"),
        } | faults.get("info", {})
        is_token_level = settings.get("aggregation") == "token_mean"
        if settings.get("policy_loss") == "sft":
            return {"loss": self._openrlhf.SFTLoss(is_token_level)(batch.trainer_logprobs, mask, **info)}
        if settings.get("policy_loss") == "dpo":
            sums = [(of * mask).sum(dim=1) for of in (batch.trainer_logprobs, batch.reference_logprobs)]
            pairs = [of[start::2] for of in sums for start in faults.get("order", (0, 1))]
            loss, _, _ = self._openrlhf.DPOLoss(settings["beta"], settings.get("label_smoothing", 0.0))(
                *pairs
            )
            return {"loss": loss}
        groups = batch.rewards.view(len(batch.group_ids.unique()), -1)
        advantages = (
            (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-9)
        ).flatten()
        kinds = {"truncated": "tis", "icepop": "icepop", "sequence_mask": "seq-mask-tis"}
        kind = settings.get("importance_correction")
        compute = self._openrlhf.PolicyLoss(
            clip_eps_low=settings.get("clip_low", 0.2),
            clip_eps_high=settings.get("clip_high", 0.2),
            dual_clip=settings.get("dual_clip"),
            token_level_loss=is_token_level,
            policy_loss_type="gspo" if settings.get("ratio") == "sequence" else "ppo",
            enable_vllm_is_correction=kind is not None and not faults.get("no_weights"),
            vllm_is_truncated_threshold=[settings.get("importance_low", 0), settings.get("importance_high")],
            vllm_is_correction_type=kinds[faults.get("kind", kind) or "truncated"],
        )
        old = faults.get("old", batch.old_logprobs)
        loss, *_ = compute(
            batch.trainer_logprobs,
            old,
            advantages[:, None].to(mask.dtype).expand(mask.shape),
            mask,
            faults.get("inference", batch.inference_logprobs),
            **info,
        )
        return {"loss": loss, "advantages": advantages}

    # --- NeMo-RL: token tensors are of whole sequences ---

    def nemo(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        estimator = self._nemo_advantages.GRPOAdvantageEstimator(
            SimpleNamespace(
                use_leave_one_out_baseline=settings.get("baseline") == "leave_one_out",
                normalize_rewards=settings.get("advantage_std") != "none",
            ),
            None,
        )
        mask = batch.token_mask.float()
        prompts = batch.group_ids[:, None]
        advantages = estimator.compute_advantage(prompts, batch.rewards, mask)
        config = self._nemo.ClippedPGLossConfig()
        kinds = {"truncated": "tis", "icepop": "icepop", "sequence_mask": "seq-mask-tis"}
        kind = None if faults.get("no_weights") else settings.get("importance_correction")
        chosen = {
            "token_level_loss": settings["aggregation"] == "token_mean",
            "sequence_level_importance_ratios": settings.get("ratio") == "sequence",
            "ratio_clip_min": settings.get("clip_low", 0.2),
            "ratio_clip_max": settings.get("clip_high", 0.2),
            "ratio_clip_c": settings.get("dual_clip"),
            "reference_policy_kl_penalty": settings.get("kl_coefficient", 0.0),
            "reference_policy_kl_type": faults.get("estimator", settings.get("kl_estimator", "k3")),
            "disable_ppo_ratio": settings.get("policy_loss") == "reinforce",
            "use_cispo": settings.get("policy_loss") == "cispo",
            "use_importance_sampling_correction": kind is not None,
            "truncated_importance_sampling_type": kinds.get(kind or ""),
            "truncated_importance_sampling_ratio": settings.get("importance_high") if kind else None,
            "truncated_importance_sampling_ratio_min": settings.get("importance_low"),
            "force_on_policy_ratio": settings.get("ratio") == "on_policy" or faults.get("on_policy", False),
        }
        for key, value in chosen.items():
            setattr(config, key, value)
        padded = {name: torch.nn.functional.pad(getattr(batch, name).detach(), (1, 0)) for name in LOGPROBS}
        data = {
            "token_mask": torch.nn.functional.pad(faults.get("mask", batch.token_mask).float(), (1, 0)),
            "sample_mask": torch.ones(len(mask)),
            "advantages": torch.nn.functional.pad(
                faults.get("advantages", lambda of: of)(advantages), (1, 0)
            ),
            "prev_logprobs": padded["old_logprobs"],
            "generation_logprobs": padded["inference_logprobs"],
            "reference_policy_logprobs": padded["reference_logprobs"],
        }
        rows, tokens = (torch.tensor(float(of)) for of in (len(mask), mask.sum()))
        counts = {"global_valid_seqs": rows, "global_valid_toks": tokens}
        names = {"global_valid_seqs": "num_sequences", "global_valid_toks": "num_tokens"}
        counts = {key: torch.tensor(float(settings.get(names[key], of))) for key, of in counts.items()}
        counts |= faults.get("counts", {})
        loss, metrics = self._nemo.ClippedPGLossFn(config)(batch.trainer_logprobs, data, **counts)
        kept = ("probs_ratio_max", "probs_ratio_min")
        kept = kept if settings.get("policy_loss") != "reinforce" else ()
        return {
            "loss": loss,
            "advantages": advantages[:, 0],
            "metrics": {name: metrics[name] for name in kept},
            "no_gradients": bool(settings.get("kl_coefficient")),  # with the score function's
        }

    # --- TRL, and its Liger path ---

    def trl(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        advantages = self._trl_advantages(batch, settings, faults)
        kind = settings.get("importance_correction")
        weights = None if kind is None else _trl_weights(batch, settings)
        steps = settings.get("gradient_accumulation", 1)
        loss_types = {"sequence_mean": "grpo", "sequence_sum_constant": "dr_grpo", "token_mean": "dapo"}
        loss_type = faults.get("loss_type", loss_types[settings["aggregation"]])
        if settings.get("policy_loss") == "cispo":
            loss_type = "cispo"
        own = SimpleNamespace(
            aux_loss_enabled="auxiliary_coefficient" in settings,
            router_aux_loss_coef=settings.get("auxiliary_coefficient", 0) * steps,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="sequence" if settings.get("ratio") == "sequence" else "token",
            beta=settings.get("kl_coefficient", 0.0),
            args=_Defaults(
                use_bias_correction_kl=settings.get("kl_weighted", False), steps_per_generation=steps
            ),
            loss_type=loss_type,
            epsilon_low=settings.get("clip_low", 0.2),
            epsilon_high=settings.get("clip_high", 0.2) + (loss_type == "cispo" and 1),
            use_vllm=kind is not None and not faults.get("no_weights"),
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=steps,
            accelerator=_Accelerator(settings.get("data_parallel_size", 1)),
            max_completion_length=settings.get("max_completion_tokens"),
            _entropy_bonus_enabled=False,
            model=SimpleNamespace(training=True),
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        auxiliary = torch.tensor(0.75)
        own._get_per_token_logps_and_entropies = lambda *_, **__: (
            faults.get("current", batch.trainer_logprobs),
            batch.entropy,
            auxiliary,
        )
        mask = faults.get("mask", batch.token_mask).long()
        inputs = {
            "prompt_ids": mask[:, :0],
            "prompt_mask": mask[:, :0],
            "completion_ids": batch.token_ids,
            "completion_mask": mask,
            "advantages": faults.get("advantages", lambda of: of)(advantages),
            "old_per_token_logps": faults.get("old", batch.old_logprobs),
            "ref_per_token_logps": batch.reference_logprobs,
            "importance_sampling_ratio": weights,
            "num_items_in_batch": torch.tensor(settings.get("num_tokens") or float(batch.token_mask.sum())),
        }
        inputs["num_items_in_batch"] *= settings.get("data_parallel_size", 1)
        compute = self._trl.GRPOTrainer._compute_loss
        if faults.get("liger"):
            loss = self._liger_loss(batch, settings, advantages, loss_type, faults) / steps
        else:
            loss = compute(own, SimpleNamespace(training=True), inputs)
        return {
            "loss": loss,
            "advantages": advantages,
            "importance_weights": weights,
            "auxiliary_loss": auxiliary if own.aux_loss_enabled else None,
        }

    def _trl_advantages(self, batch: Any, settings: dict[str, Any], faults: dict[str, Any]) -> Tensor:
        """Run the statement of TRL's trainer that turns rewards into advantages."""
        source = inspect.getsource(self._trl.GRPOTrainer._generate_and_score_completions)
        (statement,) = (
            node
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.If)
            and "self.multi_objective_aggregation == 'sum" in ast.unparse(node.test)
        )
        size = int((batch.group_ids == batch.group_ids[0]).sum())
        names = vars(self._trl) | {
            "self": SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize",
                reward_weights=torch.tensor(settings["reward_weights"]),
                scale_rewards=faults.get("scale", settings.get("advantage_std", "group")),
            ),
            "rewards_per_func": batch.reward_parts,
            "unscorable_mask": torch.zeros(len(batch.rewards), dtype=torch.bool),
            "num_generations": size,
            "device": torch.device("cpu"),
        }
        exec(compile(ast.Module([statement], []), "trl", "exec"), names)
        return names["advantages"]

    def _liger_loss(
        self, batch: Any, settings: dict[str, Any], advantages: Tensor, loss_type: str, faults: Any
    ) -> Tensor:
        """Liger's loss as TRL 0.27 calls it: without importance weights and without the batch's tokens."""
        mask = batch.token_mask.to(batch.trainer_logprobs.dtype)
        loss, _ = self._liger.LigerFusedLinearGRPOFunction.ppo_loss_fn(
            batch.trainer_logprobs,
            mask,
            advantages,
            mask,
            ref_per_token_logps=batch.reference_logprobs,
            old_per_token_logps=batch.old_logprobs,
            beta=settings.get("kl_coefficient", 0.0),
            loss_type=loss_type,
            num_items_in_batch=faults.get("num_items"),
        )
        return loss

    # --- torchtitan and prime-rl ---

    def torchtitan(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        groups = batch.rewards.view(len(batch.group_ids.unique()), -1)
        advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
        compute = self._titan.DAPOLoss(
            SimpleNamespace(
                ratio_clip_low=settings.get("clip_low", 0.2), ratio_clip_high=settings.get("clip_high", 0.2)
            )
        )
        flat = {name: getattr(batch, name).flatten() for name in LOGPROBS}
        loss, _ = compute(
            flat["trainer_logprobs"],
            batch.token_ids.flatten(),
            faults.get("tokens", settings.get("num_tokens") or float(batch.token_mask.sum())),
            generator_logprobs=flat["old_logprobs"],
            advantages=advantages[:, None].expand(batch.token_mask.shape).flatten(),
            loss_mask=faults.get("mask", batch.token_mask).flatten(),
        )
        return {"loss": loss, "advantages": advantages}

    def prime(self, batch: Any, settings: dict[str, Any], **faults: Any) -> dict[str, Any]:
        inputs = SimpleNamespace(
            trainer_logprobs=batch.trainer_logprobs,
            loss_mask=faults.get("mask", batch.token_mask),
            loss_weights=None,
        )
        return {"loss": self._prime.ce_loss_fn(inputs).loss / settings.get("num_tokens", 1)}


class _Config(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class _Model:
    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Defaults(SimpleNamespace):
    """Settings that are None unless given."""

    def __getattr__(self, name: str) -> None:
        return None


class _Accelerator:
    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


class _LigerBase:
    @staticmethod
    def _compute_dapo_normalizer(mask: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return mask.sum().clamp(min=1.0) if num_items_in_batch is None else num_items_in_batch


_SKYRL_MASKS = ("compute_outlier_token_mask", "compute_sequence_mask", "compute_token_mask")


def _logprobs_of(logits: Tensor, labels: Tensor, return_entropy: bool) -> tuple[Tensor, Tensor]:
    return logits, torch.zeros_like(logits)


def _boundaries(group_ids: Tensor) -> list[tuple[int, int]]:
    counts = torch.unique_consecutive(group_ids, return_counts=True)[1].cumsum(0).tolist()
    return list(zip([0, *counts], counts, strict=False))


def _trl_weights(batch: Any, settings: dict[str, Any]) -> Tensor:
    """TRL's weights, of its modes token_truncate and sequence_mask."""
    gap = (batch.old_logprobs - batch.inference_logprobs) * batch.token_mask
    if settings["importance_correction"] == "truncated":
        return gap.exp().clamp(max=settings["importance_high"])
    weights = gap.sum(dim=-1, keepdim=True).exp()
    return weights.masked_fill(weights > settings["importance_high"], 0.0)


def make_dump(name: str, case: Any, frameworks: Frameworks, path: Path, seed: int) -> None:
    """Run a case and write its dump."""
    batch = make_batch(seed, **{**cases.SHAPE, **case.shape})
    preset = ALGORITHMS[case.algorithm]
    ran = preset | case.settings | cases.RUN_SETTINGS.get(name, {})
    if case.framework in ("trl", "nemo", "torchtitan") and case.shape.get("prompt"):
        batch.attention_mask = batch.token_mask  # their loss sees completions
        batch.prompt_mask = torch.zeros_like(batch.token_mask)
    if case.logits:
        scaled = (batch.logits / case.logits).log_softmax(dim=-1)
        logprobs = scaled.gather(-1, batch.token_ids[..., None])[..., 0]
        move = logprobs - batch.trainer_logprobs.detach()
        for key in LOGPROBS:  # as far apart as they were
            moved = getattr(batch, key).detach() + move
            setattr(batch, key, moved.to(batch.old_logprobs.dtype))
        batch.trainer_logprobs = logprobs.to(batch.old_logprobs.dtype).requires_grad_()
    result = getattr(frameworks, case.framework)(batch, ran, **case.faults(batch))
    has_rewards = case.algorithm not in ("sft", "dpo")
    kept = [key for key in INPUTS if has_rewards or ("reward" not in key and key != "group_ids")]
    tensors = {key: getattr(batch, key) for key in (*kept, *LOGPROBS)}
    if case.logits:
        places = batch.token_mask.nonzero()[:5]
        tensors |= {"logit_tokens": places, "logits": batch.logits[places[:, 0], places[:, 1]]}
    tensors |= {key: of for key, of in result.items() if isinstance(of, Tensor)}
    if not result.get("no_gradients"):
        (tensors["logprob_gradients"],) = torch.autograd.grad(result["loss"], batch.trainer_logprobs)
    if case.change is not None:
        case.change(tensors)
    dumped = case.settings | cases.DUMPED_SETTINGS.get(name, {})
    if case.logits:
        dumped = {"temperature": case.logits} | dumped
    write_dump(path, tensors, algorithm=case.algorithm, settings=dumped, metrics=result.get("metrics"))


def main(mirrors: Path) -> None:
    torch.set_num_threads(1)
    sources = Mirrors(mirrors)
    frameworks = Frameworks(sources)
    index: dict[str, Any] = {
        "sources": sources.sources | {"trl": version("trl"), "torch": torch.__version__},
        "cases": {},
    }
    with (
        zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive,
        tempfile.TemporaryDirectory() as folder,
    ):
        for seed, (name, case) in enumerate([*cases.clean(), *cases.FAULTS.items()]):
            path = Path(folder) / f"{name}.safetensors"
            make_dump(name, case, frameworks, path, seed)
            entry = zipfile.ZipInfo(path.name)  # without the time
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
            index["cases"][name] = {"framework": case.framework, "first": case.first, "says": case.says}
        archive.writestr(zipfile.ZipInfo("index.json"), json.dumps(index, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
