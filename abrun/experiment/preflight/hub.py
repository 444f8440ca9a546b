"""Whether a hub's model can be had here, asked once and shortly: its trainer would ask for half a minute."""

import importlib.util

from abrun.reasons import Code, Reason

CONFIG_FILE = "config.json"

HUB_TIMEOUT_S = 10.0


def hub_refusal(name: str) -> Reason | None:
    """Return why the model cannot load here; None: it can, or only its trainer can tell."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None  # nor can it train here, which is said as such
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
        return Code.HUB_NAME_INVALID()
    except GatedRepoError:
        return Code.HUB_MODEL_GATED()
    except RepositoryNotFoundError:
        return Code.HUB_MODEL_UNKNOWN()
    except HfHubHTTPError as error:
        status = error.response.status_code
        passes = status == 429 or status >= 500  # before its trainer asks, who asks again
        return None if passes else Code.HUB_STATUS(status=status)
    except OfflineModeIsEnabled:
        return Code.HUB_OFFLINE()
    except Exception as error:  # of whichever library the client speaks HTTP by
        return Code.HUB_UNREACHABLE(error=" ".join(str(error).split())[:80] or type(error).__name__)
    return None
