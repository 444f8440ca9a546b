"""Groups: a prompt with its completions and their rewards."""

from dataclasses import dataclass

from abrun.rollout import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The completions of one prompt."""

    prompt: list[int]
    completions: list[Completion]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ, so that advantages relative to their mean are not all 0."""
        return any(reward != self.rewards[0] for reward in self.rewards)
