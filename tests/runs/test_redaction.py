"""What counts as a secret, by its shape or as a variable, and that none is left where it is shown."""

import base64
import time
from urllib.parse import quote

import pytest

from abrun.runs.redaction import (
    Mask,
    display_safe,
    has_token,
    hide_values,
    is_secret_variable,
    one_line,
    redacted,
    without_secrets,
)

LETTERS = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ"
TOKENS = [
    f"hf_{LETTERS}",
    f"ghp_{LETTERS}",
    f"gho_{LETTERS}",
    f"github_pat_11{LETTERS}",
    f"sk-proj-{LETTERS}",
    f"gsk_{LETTERS}{LETTERS}",
    f"dckr_pat_{LETTERS}",
    "AKIAIOSFODNN7EXAMPLE",
    f"xoxb-123456789012-{LETTERS}",
    f"AIzaSy{LETTERS}01234567",
    f"wandb_v1_{LETTERS}",
    f"local-{'0123456789' * 4}",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dBjftJeZ4CVP",
    f"https://hooks.slack.com/services/T0123/B0123/{LETTERS}",
    "MII" + LETTERS * 4,
    f"api_key: {'0123456789' * 4}",
    f"machine api.wandb.ai login user password {LETTERS}",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQOYBF\n-----END PGP PRIVATE KEY BLOCK-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE\n-----END OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_shape_wherever_it_stands(token: str) -> None:
    for text in (token, f"401: bad key '{token}'", f"--key={token}", f"https://hub/?a={token}"):
        without = redacted(text)
        assert token not in without and "<secret sha256:" in without
        assert redacted(without) == without
    assert is_secret_variable("anything", token) and has_token(token)
    assert redacted(f"{token}") != redacted(f"{TOKENS[0]}x")  # two secrets are seen to differ


def test_a_password_in_a_url_goes_and_its_user_stays() -> None:
    assert redacted("postgres://me:hunter2@db:5432/x") == "postgres://me:<secret>@db:5432/x"
    for none in ("https://host:8080/a@b", "https://me@host/", "https://me:${PASSWORD}@host", "s3://a/b:c@d"):
        assert redacted(none) == none


SECRET_VARIABLES = (
    *("WANDB_API_KEY", "DB_PASSWORD", "dbPassword", "hub_token", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
    *("MYSQL_PWD", "SMTP_PASS", "HFTOKEN", "db_pass", "GITHUBTOKEN", "OPENAIAPIKEY", "CLIENTSECRET"),
)
OTHER_VARIABLES = (
    *("TOKENIZERS_PARALLELISM", "PASSES", "MAX_TOKENS", "KEYS_PER_NODE", "PYTORCH_CUDA_ALLOC_CONF", "PWD"),
    *("NCCL_DEBUG", "WANDB_MODE", "BYPASS", "COMPASS", "KEYBOARD", "MONKEY", "sort_key", "PASSTHROUGH"),
    *("SECRET_SAUCE_PATH", "HOTKEY", "AUTHOR", "PATTERN", "TOKENS_PER_STEP", "secretary", "pass@8"),
    *("HF_TOKEN_PATH", "REWARD_KEY", "AUTH_MODE", "TOKEN_LEVEL_LOSS", "PASSWORD_FILE"),
)


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_the_end_of_a_variable_s_name_says_that_it_holds_a_secret(name: str) -> None:
    for value in ("hunter2", "hunter-two", "123456789123", "wJalrXUtnFEMI/K7MDENG"):
        assert is_secret_variable(name, value)
    for value in (
        "",
        "true",
        "512",
        "END",
        "${HERE}",
        "$HERE",
        "$(cat key)",
        "{key}",
        "<pad>",
        "~/.key",
        "/key",
    ):
        assert not is_secret_variable(name, value)


@pytest.mark.parametrize("name", OTHER_VARIABLES)
def test_other_variables_hold_none_unless_its_format_is_known(name: str) -> None:
    assert not is_secret_variable(name, "plain") and not is_secret_variable(name, "0123456789" * 4)
    assert is_secret_variable(name, f"Bearer {LETTERS}")


def test_a_tree_loses_what_is_known_and_no_key_makes_a_value_a_secret() -> None:
    hide_values({"DB_PASSWORD": "correct-horse"})
    tree = {"api_key": "hunter2", "list": [TOKENS[0], ("correct-horse", 3)], "url": "https://me:hunter2@host"}
    assert without_secrets(tree) == {
        "api_key": "hunter2",
        "list": [redacted(TOKENS[0]), ["${DB_PASSWORD}", 3]],
        "url": "https://me:<secret>@host",
    }


KNOWN_IN_PROGRAMS = [
    f"train --token={TOKENS[0]}",
    f"curl -H 'Authorization: Bearer {LETTERS}'",
    "git clone https://X1aB2cD3eF4gH5iJ6@gitlab.com/x",
    "mysql://u:X@h/db",
    f"wandb login {'0123456789' * 4}; train",
    f'train --config \'{{"api_key": "{"0123456789" * 4}"}}\'',
    f"a{TOKENS[0]} {TOKENS[0]}",  # the first is part of a word
]
PLAIN_PROGRAMS = [
    "python train.py --lr 1e-4 --max-tokens 512 --tokenizer qwen --eos-token END",
    "docker run -u app:app image; docker pull image:1@sha256:0123abc",
    "curl -H 'Authorization: Bearer ${{HF_TOKEN}}'",
    "python -c 'token = next_token(ids); f(token=token)'",
    "git clone git@github.com:a/b; git clone https://me@host/x",
    "train --name sk-ablation-learning-rate-sweep",
    f"git checkout {'0123456789' * 4}",
    "train --db-password hunter2; curl -u me:hunter2 https://host; PGPASSWORD=hunter2 psql",  # not guessed
]


@pytest.mark.parametrize("text", KNOWN_IN_PROGRAMS)
def test_a_known_format_within_a_line_of_shell(text: str) -> None:
    assert has_token(text) and not has_token(redacted(text))


@pytest.mark.parametrize("text", PLAIN_PROGRAMS)
def test_a_line_of_shell_without_known_formats(text: str) -> None:
    assert not has_token(text) and redacted(text) == text


def test_overlapping_tokens_go_as_one() -> None:
    assert redacted(f"xox{'a'}-{'b' * 12}-{TOKENS[0]} c") == redacted(f"xoxa-{'b' * 12}-{TOKENS[0]}") + " c"
    assert "hf_" not in redacted(f"https://host/?token=abc.{TOKENS[0]}")


def test_hidden_values_are_masked_in_every_usual_form() -> None:
    secret, key = "correct horse/+&'4", "-----BEGIN X\nMIIEvAIBADANBg\nkqhkiG9w0BAQEF\n"
    hide_values({"DB_PASS": secret, "KEY": key, "SHORT": "abc", "NUM": "1000", "FLAG": "true"})
    assert redacted(f"<{secret}>") == "<${DB_PASS}>"
    for text in (quote(secret, safe=""), repr(secret), *key.split("\n")[1:3], repr(key)):
        assert "${" in redacted(f"a {text} b") and text.strip("'\"") not in redacted(f"a {text} b")
    for user in ("", "u:", "us:", "use:"):
        encoded = base64.b64encode(f"{user}{secret}".encode()).decode()
        assert "${DB_PASS}" in redacted(f"Basic {encoded}")
    assert redacted("step 1000 abc true") == "step 1000 abc true"
    for before in range(1980, 2010):
        assert "correct" not in one_line("x" * before + f" {secret}").replace("${DB_PASS}", "")
        assert "corr" not in one_line(" " * before * 5 + secret)


def test_a_short_word_masks_no_names_of_metrics() -> None:
    hide_values({"MODE": "train", "PGPASSWORD": "gsm8k", "DB_PASS": "hunter2", "DB": "correcthorse"})
    assert redacted("train/reward gsm8k/accuracy training") == "train/reward gsm8k/accuracy training"
    assert redacted("as hunter2, correcthorse") == "as ${DB_PASS}, ${DB}"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_a_stream_is_masked_however_it_is_cut(size: int) -> None:
    mask = Mask({"A": "abc4efgh", "B": "abc4ef", "C": "c4efghij", "D": "two\nlines of it"})
    content = b"xabc4efghij abc4ef abc4efg c4efghi\ntwo\nlines of it. two\nlines two, abc4efabc4efgh ab"
    out, rest = b"", b""
    for begin in range(0, len(content), size):
        done, rest = mask.hide_bytes(rest + content[begin : begin + size], more=True)
        out += done
    out += mask.hide_bytes(rest, more=False)[0]
    assert out == mask.hide_bytes(content, more=False)[0]
    assert out == b"x${A}ij ${B} ${B}g c4efghi\n${D}. two\nlines two, ${B}${A} ab"


@pytest.mark.parametrize(
    "piece", ["a", "a.b-", "eyJ-", "sk-", "sk-a1-", ":/a:", "TOKEN=", "a=", "://a1", "$(", "iVBORw0KGgo"]
)
def test_one_long_line_takes_no_longer_than_many(piece: str) -> None:
    """Such as a picture in a notebook, in the diff of a checkout."""
    text = piece * (100_000 // len(piece))
    begin = time.process_time()
    redacted(text)
    assert time.process_time() - begin < 2


def test_a_megabyte_of_a_log_takes_a_fraction_of_a_second() -> None:
    """0.03 s, alone on a core; each pattern at each character took 0.6 s."""
    text = '{"step": 12, "train/reward": 0.123456, "timing/step_s": 1.25}\n' * 16_000
    begin = time.process_time()
    assert redacted(text) == text
    assert time.process_time() - begin < 0.4


def test_nothing_shown_moves_a_cursor() -> None:
    text = "a\x1b]0;title\x07\x9b31m\u202eb\r\nc\x7f\u2028" + TOKENS[0]
    assert display_safe(text).isprintable() and "hf_" not in display_safe(text)
    assert display_safe("plain \u00e4 \u4e2d") == "plain \u00e4 \u4e2d"
