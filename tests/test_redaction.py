"""What counts as a secret, by shape and by name, and that nothing of it is left where it is shown."""

import time

import pytest

from abrun.redaction import is_secret, redacted, redacted_code, shown, without_secrets

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
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE\n-----END OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_token_is_known_by_its_shape_wherever_it_stands(token: str) -> None:
    for text in (token, f"401: bad key '{token}'", f"--key={token}", f"https://hub/?a={token}"):
        without = redacted(text)
        assert token not in without and "<secret sha256:" in without
        assert redacted(without) == without
    assert is_secret("anything", token)
    assert redacted(f"{token}") != redacted(f"{TOKENS[0]}x"), "two secrets are seen to differ"


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


def test_code_keeps_its_sense_without_what_it_assigns_to_secrets() -> None:
    code = '+HF_TOKEN=hunter22\n+os.environ["DB_PASSWORD"] = "hunter22"\n+{"api_key": "hunter22"}\n'
    assert redacted_code(code) == code.replace("hunter22", "<secret>")
    for plain in ("+token = next_token(ids)\n", "+max_tokens = 512\n", "+key=value\n"):
        assert redacted_code(plain) == plain


@pytest.mark.parametrize("piece", ["a", "a.b-", "eyJ-", "sk-", "sk-a1-", ":/a:", "TOKEN=", "iVBORw0KGgo"])
def test_one_long_line_takes_no_longer_than_many(piece: str) -> None:
    """Such as a picture in a notebook, in the diff of a checkout."""
    text = piece * (250_000 // len(piece))
    begin = time.process_time()
    redacted_code(text)
    assert time.process_time() - begin < 5


def test_nothing_shown_moves_a_cursor() -> None:
    text = "a\x1b]0;title\x07\x9b31m\u202eb\r\nc\x7f\u2028" + TOKENS[0]
    assert shown(text).isprintable() and "hf_" not in shown(text)
    assert shown("plain \u00e4 \u4e2d") == "plain \u00e4 \u4e2d"
