"""Quick check that a hub model is available; the trainer itself would retry for half a minute."""

import importlib.util

CONFIG_FILE = "config.json"

HUB_TIMEOUT_S = 10.0


def hub_refusal(name: str) -> str | None:
    """Return why the model is unavailable; None if it is available or only the trainer can tell."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None  # another check reports the missing package
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if not isinstance(try_to_load_from_cache(name, CONFIG_FILE), str):
            get_hf_file_metadata(hf_hub_url(name, CONFIG_FILE), timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "it is not a valid hub name"
    except GatedRepoError:
        return "the hub model is gated: request access, then log in (hf auth login)"
    except RepositoryNotFoundError:
        return "the hub has no such model, or it is private (hf auth login)"
    except HfHubHTTPError as error:
        status = error.response.status_code
        passes = status == 429 or status >= 500  # temporary: the trainer retries
        return None if passes else f"the hub answers with status {status}"
    except OfflineModeIsEnabled:
        return "it is not cached, and HF_HUB_OFFLINE is set"
    except Exception as error:  # of whichever library the client speaks HTTP by
        return f"the hub cannot be reached ({' '.join(str(error).split())[:80] or type(error).__name__})"
    return None
