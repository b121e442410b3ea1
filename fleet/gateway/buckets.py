"""Token buckets: so many a second on average, a burst at once."""

import math

_MOST_KEYS = 50_000


class Buckets:
    """One bucket a key."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        """Every bucket is full at first."""
        self._per_s, self._burst = per_s, burst
        self._spent: dict[str, tuple[float, float]] = {}

    def wait_s(self, key: str, now_s: float) -> int:
        """0 and one token less, or the seconds until there is one.

        Args:
            key: Whose bucket.
            now_s: Of a monotonic clock.
        """
        level, at_s = self._spent.get(key, (float(self._burst), now_s))
        level = min(self._burst, level + (now_s - at_s) * self._per_s)
        if level < 1:
            return math.ceil((1 - level) / self._per_s)
        if len(self._spent) >= _MOST_KEYS:
            self._forget_full(now_s)
        self._spent[key] = level - 1, now_s
        return 0

    def _forget_full(self, now_s: float) -> None:
        """A full bucket is as good as none; were all half empty, the emptiest stay."""
        full_s = self._burst / self._per_s
        kept = {key: spent for key, spent in self._spent.items() if now_s - spent[1] < full_s}
        if len(kept) >= _MOST_KEYS:
            emptiest = sorted(kept.items(), key=lambda item: item[1][0])
            kept = dict(emptiest[: _MOST_KEYS // 2])
        self._spent = kept
