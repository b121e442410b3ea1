"""Why a device does not take, or does not run, a release."""

from typing import Literal

from fleet.device.errors import EdgeloopError, EngineError

Reason = Literal[
    "network",  # the repository does not answer, or not completely
    "url",  # it is not one that this device talks to
    "expired",  # freshness of the repository is over: an outage, or somebody holds updates back
    "clock",  # the device's clock cannot tell whether the repository is fresh
    "signature",  # not signed by who must sign it
    "rollback",  # older metadata than was seen before, or parts of several states of the repository
    "hash",  # other bytes than were signed
    "length",  # another length than was signed
    "metadata",  # signed, but not a repository of this form
    "content",  # signed, but no release or policy that this version reads
    "counter",  # not newer than what the device has
    "bad",  # failed on this device before
    "rollout",  # not this device's turn
    "tier",  # the release says that this tier keeps what it has
    "engine",  # another engine than the release was proven with
    "monitor",  # another monitor than the release is bound to
    "config",  # a runtime config that this version does not know
    "preprocess",  # not the preprocessing whose hash the release carries, or not the model's
    "labels",  # not the labels of this model
    "golden",  # other answers than the release was proven with
    "model",  # the engine cannot open or run it
    "crash",  # the process ended several times while it tried this release
    "disk",  # no room, or not writable
    "nothing",  # there is no release here yet
]


class UpdateRefusedError(EdgeloopError):
    """A release or policy is refused; what ran before goes on. `reason` is for programs."""

    exit_code = 1

    def __init__(self, reason: Reason, said: str) -> None:
        """Keep the reason apart.

        Args:
            reason: One of `Reason`.
            said: One sentence with the values got and expected.
        """
        super().__init__(f"refused ({reason}): {said}")
        self.reason, self.said = reason, said


class AbnormalOutputError(EngineError):
    """The engine answered with logits that are not finite, or of another shape than the release says."""
