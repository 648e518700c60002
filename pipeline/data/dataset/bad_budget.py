"""How many samples may be unreadable. Numpy and the manifest only, because commands without torch use it too."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Split

# The default share: of all samples, and of the first _FEW, because a small folder with three broken files is common.
_SHARE, _SHARE_OF_FEW, _FEW = 0.001, 0.01, 100_000


@dataclass(frozen=True)
class BadBudget:
    """How many distinct samples may be unreadable: a share of all that are read, and at least `least` unless the share
    is 0.

    share: None is 1 % of the first 100,000 samples, or 0.1 % of all where that is more. setting: the setting that gave
    `share`; empty if none did. remedy: the last sentence of the error. least: 1 where samples are trained on or scored;
    more where each is reported by itself.
    """

    share: float | None
    setting: str = "data.max_bad_share"
    remedy: str = "Check the shards, or raise data.max_bad_share."
    least: int = 1

    def allowed(self, num_samples: int) -> int:
        """The largest number of unreadable samples of `num_samples`."""
        if self.share == 0:
            return 0
        if self.share is None:
            return max(self.least, int(_SHARE * num_samples), int(_SHARE_OF_FEW * min(num_samples, _FEW)))
        return max(self.least, int(self.share * num_samples))

    def excess(self, bad: Mapping[int, str], split: Split, num_samples: int) -> str:
        """An error message if these samples of the split, row -> reason, are more than allowed of `num_samples`; else
        empty.
        """
        if len(bad) <= self.allowed(num_samples):
            return ""
        row = min(bad)
        limit = f", more than {self.setting} = {self.share} allows ({self.allowed(num_samples)})" * bool(self.setting)
        return (
            f"{counted(len(bad), 'sample')} of {num_samples} cannot be read{limit}; the first is"
            f" {split.keys([row])[0]}: {bad[row]}. {self.remedy}"
        )

    def excess_of_any_set(self, bad: Mapping[int, str], split: Split) -> str:
        """The error message if these rows of a training split are more than allowed of one of its sets; else empty."""
        first = 0
        for part in split.parts:
            own = {row - first: reason for row, reason in bad.items() if first <= row < first + len(part)}
            if text := self.excess(own, part, len(part)):
                return text
            first += len(part)
        return ""
