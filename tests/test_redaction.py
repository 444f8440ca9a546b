"""What counts as a secret, by shape and by name, and that nothing of it is left where it is shown."""

import base64
import time
from urllib.parse import quote

import pytest

from abrun.recipe.secrets import has_secret_in_text
from abrun.redaction import (
    Mask,
    display_safe,
    has_token,
    hide_values,
    is_secret,
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
    assert is_secret("anything", token)
    assert redacted(f"{token}") != redacted(f"{TOKENS[0]}x")  # two secrets are seen to differ


def test_a_password_in_a_url_goes_and_its_user_stays() -> None:
    assert redacted("postgres://me:hunter2@db:5432/x") == "postgres://me:<secret>@db:5432/x"
    for none in ("https://host:8080/a@b", "https://me@host/", "https://me:${PASSWORD}@host", "s3://a/b:c@d"):
        assert redacted(none) == none


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "0123456789" * 4),
        ("DB_PASSWORD", "hunter2"),
        ("dbPassword", "hunter2"),
        ("hub_token", "abcdef"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG"),
        ("AZURE_OPENAI_KEY", "0123456789abcdef0123456789abcdef"),
        ("SESSION_COOKIE", "sid=abcdef"),
        ("SENTRY_DSN", "https://0123456789abcdef@o1.ingest.sentry.io/2"),
        ("HTTP_AUTH", "Basic bWU6aHVudGVyMg=="),
        ("GIT_CREDENTIALS", "me"),
        ("SOME_KEY", "550e8400-e29b-41d4-a716-446655440000"),
        ("header", f"Bearer {LETTERS}"),
        ("url", f"https://host/?token={LETTERS}"),
    ],
)
def test_a_secret_is_known_by_its_name(name: str, value: str) -> None:
    assert is_secret(name, value)
    tree = {"env": {name: value}, f"trainer.env.{name}": value, "list": [f"{name}"]}
    assert value not in str(without_secrets(tree)) and name in str(without_secrets(tree))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "512"),
        ("KEY_VALUE", "/data/store-0123456789abc"),
        ("HF_TOKEN_PATH", "~/.cache/huggingface/token"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-0123/agent.1"),
        ("HF_TOKEN", "${HF_TOKEN}"),
        ("HF_TOKEN", ""),
        ("PAD_TOKEN", "<pad>"),
        ("REWARD_KEY", "reward"),
        ("AUTH_MODE", "basic"),
        ("TOKEN_LEVEL_LOSS", "sum"),
        ("MONKEY", "banana0123456789abcdef"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("revision", "0123456789" * 4),
        ("eos_token", "END"),
        ("image-token", "IMG"),
        ("per_token", "mean"),
        ("data.reward_fn_key", "data_source_v1_long_name"),
        ("image_key", "images_resized_224x224"),
        ("CACHE_KEY", "qwen2.5-7b-instruct-gsm8k"),
        ("PASSWORD_FILE", "secrets.txt"),
        ("name", "sk-ablation-learning-rate-sweep"),
        ("HF_TOKEN", "$HF_TOKEN"),
        ("HF_TOKEN", "$(cat token)"),
    ],
)
def test_what_only_sounds_like_a_secret_is_none(name: str, value: str) -> None:
    assert not is_secret(name, value)
    assert without_secrets({name: value}) == {name: value}


UNSPLIT = (
    *("PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "SSHPASS", "HFTOKEN", "AWSSECRETKEY", "DBPASS", "db_pass"),
    *("GITHUBTOKEN", "apiToken", "OPENAIAPIKEY", "HFKEY", "SSHKEY", "CLIENTSECRET", "REDIS_PW", "DB2PASS"),
    *("user_creds", "NPM_AUTH_TOKEN", "smtpPassword", "pass", "KEY_PASSPHRASE", "LITELLM_MASTER_KEY"),
)
INNOCENT = (
    *("TOKENIZERS_PARALLELISM", "PASSES", "MAX_TOKENS", "KEYS_PER_NODE", "PYTORCH_CUDA_ALLOC_CONF"),
    *("NCCL_DEBUG", "WANDB_MODE", "BYPASS", "COMPASS", "eos_token", "EOSTOKEN", "KEYBOARD", "MONKEY"),
    *("TRANSFORMERS_CACHE", "SECRET_SAUCE_PATH", "forward_pass", "PASSTHROUGH", "HOTKEY", "sort_key"),
    *("AUTHOR", "PATTERN", "TOKENS_PER_STEP", "secretary", "PASSAGE", "TOKENIZER", "prompt_key", "pass@8"),
)


@pytest.mark.parametrize("name", UNSPLIT)
def test_names_without_separators_are_of_secrets(name: str) -> None:
    assert is_secret(name, "hunter-two")
    assert not is_secret(name, "${HERE}") and not is_secret(name, "true")


@pytest.mark.parametrize("name", INNOCENT)
def test_innocent_names_are_not_refused(name: str) -> None:
    assert not is_secret(name, "plain") and not is_secret(name, "512")


PROGRAMS = [
    "python train.py --api-key X --x; echo",
    "train --token=X",
    "train -password X",
    "train hub.api_key=X",
    "HF_TOKEN=X train",
    "set -e; export DB_PASS='X'",
    "curl -u me:X https://host",
    "curl -ume:X host",
    "curl -H 'Authorization: Bearer X'",
    "curl -H 'X-Api-Key:X'",
    "echo $(curl --user me:X host)",
    "export https_proxy=u:X@proxy:3128",
    "git clone https://X1aB2cD3eF4gH5iJ6@gitlab.com/x",
    "sshpass -p X ssh host",
    "mysql -pX db",
    "redis-cli -a X",
    "sh -c 'train --db-password X'",
    "docker run -e DB_PASS=X image",
    "docker run --env=DB_PASS=X image",
    "python -c \"login(token='X')\"",
    'train --config \'{"api_key": "X"}\'',
    "Server=db;Password=X;User=u",
    "mysql://u:X@h/db",
]
PLAIN_PROGRAMS = [
    "python train.py --lr 1e-4 --max-tokens 512 --tokenizer qwen --eos-token END",
    "docker run -u app:app image",
    "docker pull image:1@sha256:0123abc",
    "python -u train.py a:b",
    "curl -H 'Authorization: Bearer ${{HF_TOKEN}}'",
    "HF_TOKEN=${{HF_TOKEN}} train --token $HF_TOKEN",
    'train --token "$token" --api-key $(cat key) --hub-token {hub} --password `cat x`',
    "python -c 'import os; login(token=os.environ[\"HF_TOKEN\"])'",
    "python -c 'token = next_token(ids); f(token=token)'",
    "git clone git@github.com:a/b; git clone https://me@host/x",
    "train data.prompt_key=prompt data.reward_fn_key=source --password-file secrets.txt",
    "train 'what is the secret of life?' --metric pass@8:mean@16",
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_a_secret_within_a_line_of_shell(text: str) -> None:
    text = text.replace("X-Api", "x-api").replace("X", "CANARYaB3").replace("x-api", "X-Api")
    assert has_secret_in_text(text) or has_token(text)


@pytest.mark.parametrize("text", PLAIN_PROGRAMS)
def test_a_line_of_shell_without_secrets(text: str) -> None:
    assert not has_secret_in_text(text) and not has_token(text)


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
    has_secret_in_text(text)
    assert time.process_time() - begin < 8


def test_nothing_shown_moves_a_cursor() -> None:
    text = "a\x1b]0;title\x07\x9b31m\u202eb\r\nc\x7f\u2028" + TOKENS[0]
    assert display_safe(text).isprintable() and "hf_" not in display_safe(text)
    assert display_safe("plain \u00e4 \u4e2d") == "plain \u00e4 \u4e2d"
