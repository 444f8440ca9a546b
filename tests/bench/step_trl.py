"""TRL's trainer on the same model, texts and sizes, followed as a run of abrun is, for `bench_step.py`."""

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.import_utils import is_flash_attn_2_available

from tests.bench.step_parts import STEPS, Steps

ALIKE = 0.05  # of the largest logit: how far bfloat16 takes the same ones apart, and less than a mix-up does


class Clock(TrainerCallback):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self._steps.follow(optimizer, "step", "optimizer")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._steps.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps.end()


def settings_of(asked: dict[str, Any]) -> dict[str, Any]:
    on_gpu = asked["device"] == "cuda"
    return {
        "output_dir": f"{asked['work']}/trl",
        "max_steps": STEPS,
        "learning_rate": 1e-6,
        "gradient_checkpointing": True,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "use_liger_kernel": asked["liger"],
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def supervised(asked: dict[str, Any], steps: Steps) -> Any:
    """Masters in float32, products in bfloat16, as abrun has them."""
    from trl.data_utils import pack_dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_config import SFTConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.sft_trainer import SFTTrainer  # pyright: ignore[reportMissingImports]

    with open(f"{asked['work']}/data.jsonl") as file:
        texts = [json.loads(line) for line in file]
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{asked['work']}/model")
    rows = [tokenizer(f"{one['prompt']} {one['completion']} <eos>")["input_ids"] for one in texts]
    attention = "flash_attention_2" if asked["packed"] and is_flash_attn_2_available() else "sdpa"
    network: Any = AutoModelForCausalLM.from_pretrained(
        f"{asked['work']}/model", dtype=torch.float32, attn_implementation=attention
    )
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    at_once, longest = asked["rows"], max(map(len, rows))
    more: dict[str, Any] = {}
    if asked["packed"]:
        check_packing(network.to(asked["device"]), rows, asked["device"])
        longest, at_once = max(longest, asked["rows"] * asked["length"]), 1
        data = pack_dataset(data, longest, "bfd")
        # The trainer packs nothing again where it prepares nothing, and still pads nothing.
        more = {"packing": True, "packing_strategy": "bfd"}
    if len(data) % at_once:
        raise ValueError(f"got {len(data)} rows for microbatches of {at_once}")
    trainer = SFTTrainer(
        model=network,
        args=SFTConfig(
            **settings_of(asked),
            **more,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=len(data) // at_once,
            max_length=longest,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock(steps)],
    )
    steps.note = f"attention by {attention}" if asked["packed"] else ""
    return trainer


def check_packing(network: Any, rows: list[list[int]], device: str) -> None:
    """Raises ValueError where a sequence's logits depend on what stands before it in its row."""
    first, second = (torch.tensor([row[:64]], device=device) for row in rows[:2])
    places = [torch.arange(one.shape[1], device=device) for one in (first, second)]
    on_gpu = device == "cuda"
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=on_gpu):
        alone = network(input_ids=second, use_cache=False).logits
        packed = network(
            input_ids=torch.cat([first, second], dim=1),
            position_ids=torch.cat(places)[None],
            use_cache=False,
        ).logits[:, first.shape[1] :]
    apart = float((packed - alone).abs().max() / alone.abs().max())
    if apart > ALIKE:
        raise ValueError(
            f"not measured, as {network.config._attn_implementation} attention mixes the sequences of a row: "
            f"logits differ by {apart:.0%}"
        )


def policy_gradient(asked: dict[str, Any], steps: Steps) -> Any:
    """Weights in bfloat16."""
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    on_gpu, shapes = asked["device"] == "cuda", asked["shapes"]
    with open(f"{asked['work']}/data.jsonl") as file:
        prompts = [{"prompt": json.loads(line)["prompt"]} for line in file]
    more: dict[str, Any] = {}
    if on_gpu:
        more = {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.6,
            "vllm_max_model_length": shapes["prompt_words"] + shapes["completion_tokens"],
            "vllm_enable_sleep_mode": True,
        }
    trainer = GRPOTrainer(
        model=f"{asked['work']}/model",
        reward_funcs=lambda completions, **_: [float(len(text) % 2) for text in completions],
        train_dataset=Dataset.from_list(prompts),
        args=GRPOConfig(
            **settings_of(asked),
            **more,
            use_vllm=on_gpu,
            beta=0.0,
            per_device_train_batch_size=asked["rows"],
            gradient_accumulation_steps=shapes["prompts"] * shapes["group"] // asked["rows"],
            num_generations=shapes["group"],
            max_completion_length=shapes["completion_tokens"],
            model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        ),
        callbacks=[Clock(steps)],
    )
    steps.follow(trainer, "_prepare_inputs", "all else")
    if on_gpu:
        steps.follow(trainer.vllm_generation, "sync_weights", "sync")
        forget_peak_after(trainer.vllm_generation)
        steps.follow(trainer.vllm_generation, "generate", "generation")
    else:
        steps.follow(trainer, "_generate_single_turn", "generation")
    steps.follow(trainer, "_calculate_rewards", "rewards")
    before = "_get_per_token_logps_and_entropies"
    steps.follow(trainer, before, "log-probs", when=lambda: not torch.is_grad_enabled())
    return trainer


def forget_peak_after(generation: Any) -> None:
    """A peak is that of training alone, without what vLLM holds while it samples."""
    generate = generation.generate

    def generated(*args: Any, **settings: Any) -> Any:
        found = generate(*args, **settings)
        torch.cuda.reset_peak_memory_stats()
        return found

    generation.generate = generated


def asleep_bytes() -> int:
    """What torch's allocator counts on of vLLM's, which sleeps and has given it away."""
    pool = sys.modules.get("vllm.device_allocator.cumem")
    if pool is None:
        return 0
    data = pool.CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(one.handle[1] for one in data if getattr(one, "is_asleep", True))


def follow_training(trainer: Any, steps: Steps) -> list[int]:
    """What both trainers have in common; the tokens of each microbatch of the last step."""
    tokens: list[int] = []
    compute_loss = trainer.compute_loss

    def counted(model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
        if steps.looks:
            masks = [inputs[key] for key in ("prompt_mask", "completion_mask") if key in inputs]
            masks = masks or [inputs.get("attention_mask")]  # none where nothing is padded
            tokens.extend(inputs["input_ids"].numel() if one is None else int(one.sum()) for one in masks)
        return compute_loss(model, inputs, *args, **settings)

    trainer.compute_loss = counted
    # The trainer waits for each microbatch's loss, to see whether it is a number: no wait more is added here.
    steps.follow(trainer, "training_step", "forward")
    steps.follow(trainer.accelerator, "backward", "backward", inner=True)
    steps.follow(trainer.accelerator, "clip_grad_norm_", "optimizer")
    utils: Any = sys.modules["trl.trainer.utils"]
    fused = getattr(utils, "_ChunkedLogProbFunction", None)  # its head: products, and log-probs of them
    if fused is not None:

        class Followed:
            apply = staticmethod(fused.apply)

        steps.follow(Followed, "apply", "head", inner=True, when=lambda: steps.runs == "forward")
        utils._ChunkedLogProbFunction = Followed
    return tokens


def main() -> None:
    asked = json.loads(sys.argv[1])
    steps = Steps(asked["device"])
    trainer = (supervised if asked["algorithm"] == "sft" else policy_gradient)(asked, steps)
    tokens = follow_training(trainer, steps)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() - asleep_bytes() if asked["device"] == "cuda" else 0
    row = steps.row() | {
        "tokens": sum(tokens),
        "through": sum(tokens),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "peak": peak,
        "starts": {},
    }
    print("ROW " + json.dumps(row), flush=True)
    os._exit(0)  # vLLM's engine may hold on to the process


if __name__ == "__main__":
    main()
