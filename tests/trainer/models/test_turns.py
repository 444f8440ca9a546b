"""Completions end as the chat template ends a turn, in the layouts of published models."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

from abrun.recipe.policy import Model
from abrun.trainer.models.text import Text, load_text
from abrun.trainer.rl.batch import collate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    template: str
    special: tuple[str, ...]
    eos: str
    end: str  # of a turn
    rest: str = ""  # that the template writes after it


QWEN = Layout(
    template=CHATML,
    special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    end="<|im_end|>",
    rest="\n",
)
LAYOUTS = {
    "Qwen instruct": QWEN,
    "Qwen 3": dataclasses.replace(
        QWEN,
        template=(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}"
            "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    ),
    "Gemma": Layout(
        template=(
            "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
            "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
            "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
        ),
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        end="<end_of_turn>",
        rest="\n",
    ),
    "Phi 3": Layout(
        template=(
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
        ),
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        end="<|end|>",
        rest="\n<|endoftext|>",
    ),
    "Mistral": Layout(
        template=(
            "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}</s>"
            "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
        ),
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        end="</s>",
    ),
    "DeepSeek": Layout(
        template=(
            "<|begin|>{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>"
            "{{ m.content.split('</think>')[-1] }}<|end|>"
            "{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
        ),
        special=("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"),
        eos="<|end|>",
        end="<|end|>",
    ),
}


def text_of(layout: Layout, bpe: PreTrainedTokenizerFast, folder: Path, **model: Any) -> Text:
    """A tokenizer of bytes, with the layout's special tokens and template, as a checkpoint's."""
    rust: Any = bpe.backend_tokenizer.__class__.from_str(bpe.backend_tokenizer.to_str())
    rust.add_special_tokens([AddedToken(token, special=True) for token in layout.special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token=layout.eos, chat_template=layout.template
    )
    tokenizer.save_pretrained(folder)
    AutoConfig.for_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(layout.eos)).save_pretrained(folder)
    return load_text(Model(path=str(folder), **model), weights=None)


def rendered(text: Text, prompt: str, completion: str, system: str | None = None) -> list[int]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tokenizer: Any = text.tokenizer
    return tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_prompt_and_its_completion_are_what_the_template_renders(
    name: str, system: str | None, bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    text = text_of(layout, bpe, tmp_path, system_prompt=system)
    tokenizer: Any = text.tokenizer
    end, eos = tokenizer.convert_tokens_to_ids([layout.end, layout.eos])
    assert text.end_id == end and text.end_ids == {end, eos}
    prompts = ["What is 1+1?", "a\n", "What is 1+1?"]
    completions = ["It is 2.", "The answer\n\nis  42", ""]
    batch = zip(
        prompts, completions, text.encode_prompts(prompts), text.encode_completions(completions), strict=True
    )
    for prompt, completion, prompt_ids, completion_ids in batch:
        whole = rendered(text, prompt, completion, system)
        sequence = [*prompt_ids, *completion_ids]
        assert whole[: len(sequence)] == sequence and completion_ids[-1] == end
        assert tokenizer.decode(whole[len(sequence) :]) == layout.rest
        assert completion in tokenizer.decode(completion_ids)
        assert completion_ids.count(end) == 1
        row = collate([prompt_ids], [completion_ids], pad_id=text.pad_id)
        assert row.token_ids[row.token_mask].tolist() == completion_ids


def test_a_template_trims_as_it_does_for_prompts(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    text = text_of(LAYOUTS["Gemma"], bpe, tmp_path)
    assert text.encode_completions(["  42\n"]) == text.encode_completions(["42"])


def test_a_chain_of_thought_that_the_template_drops_is_kept(
    bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    text = text_of(LAYOUTS["DeepSeek"], bpe, tmp_path)
    completion = "<think>1 and 1</think>2"
    [token_ids] = text.encode_completions([completion])
    assert text.tokenizer.decode(token_ids) == completion + "<|end|>"


def test_a_prompt_that_opens_a_chain_of_thought_is_continued(
    bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The template renders no such opening for an answer, which then does not continue the prompt."""
    layout = LAYOUTS["DeepSeek"]
    template = layout.template.replace("<|Assistant|>{% endif %}", "<|Assistant|><think>\n{% endif %}")
    assert template != layout.template
    text = text_of(dataclasses.replace(layout, template=template), bpe, tmp_path)
    [prompt_ids], [token_ids] = text.encode_prompts(["1+1?"]), text.encode_completions(["so</think>2"])
    assert text.tokenizer.decode([*prompt_ids, *token_ids]) == (
        "<|begin|><|User|>1+1?<|Assistant|><think>\nso</think>2<|end|>"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}",
        "{{ messages[0].content }}:",
        "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}"
        "{{ messages[0].content }}:",
        None,
    ],
    ids=["no end token", "no answers", "refuses answers", "no template"],
)
def test_without_an_end_of_turn_a_completion_ends_with_eos(
    template: str | None, bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    layout = dataclasses.replace(LAYOUTS["Gemma"], template=template)  # pyright: ignore[reportArgumentType]
    text = text_of(layout, bpe, tmp_path)
    tokenizer: Any = text.tokenizer
    [token_ids] = text.encode_completions(["It is 2."])
    assert token_ids == [
        *tokenizer("It is 2.", add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert text.end_ids == {tokenizer.eos_token_id}


def test_a_token_that_reaches_back_into_the_prompt_is_cut_there(
    bpe: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    layout = dataclasses.replace(
        LAYOUTS["Gemma"],
        template="{% for m in messages %}{{ m.role }}: h{{ m.content }}<end_of_turn>{% endfor %}"
        "{% if add_generation_prompt %}assistant: h{% endif %}",
    )
    text = text_of(layout, bpe, tmp_path)
    tokenizer: Any = text.tokenizer
    merged = tokenizer("he", add_special_tokens=False)["input_ids"]
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("h", "e")]
    assert len(merged) < sum(map(len, pieces))
    assert text.encode_completions(["e"]) == [[*pieces[1], text.end_id]]
