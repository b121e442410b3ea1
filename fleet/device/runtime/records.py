"""The records a release carries for others to read: runtime config and preprocessing, checked field by field.

Their classes take what they are given; a release comes from outside.
"""

from collections.abc import Mapping
from typing import Any

from fleet.device.engine import RuntimeConfig
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.device.release import TierPlan
from fleet.device.runtime.refusal import UpdateRefusedError

_MOST_THREADS = 64
_NUMBER = (int, float)


def runtime_config(record: Mapping[str, Any]) -> RuntimeConfig:
    """The config in a record.

    Raises:
        UpdateRefusedError: reason `config`.
    """
    _require_fields("config", record, {"backend": str, "threads": int, "precision": str, "memory": str})
    if not 1 <= record["threads"] <= _MOST_THREADS:
        raise UpdateRefusedError("config", f"threads = {record['threads']}, allowed 1 to {_MOST_THREADS}")
    try:
        return RuntimeConfig(**record)
    except UserError as error:
        raise UpdateRefusedError("config", f"{error.got}, allowed {error.allowed}") from error


def config_name(config: RuntimeConfig) -> str:
    """Canonical name: backend, threads, precision, memory, as in `cpu-t2-normal-low`."""
    return f"{config.backend.lower()}-t{config.threads}-{config.precision}-{config.memory}"


def preprocess_of(plan: TierPlan) -> Preprocess:
    """The preprocessing of a tier, whose hash is the one the release carries.

    Raises:
        UpdateRefusedError: reason `preprocess`.
    """
    record = plan.preprocess
    kinds = {
        "size_px": int,
        "interpolation": str,
        "color_order": str,
        "layout": str,
        "dtype": str,
        "mean": list,
        "std": list,
    }
    _require_fields("preprocess", record, kinds)
    for name in ("mean", "std"):
        if any(isinstance(value, bool) or not isinstance(value, _NUMBER) for value in record[name]):
            raise UpdateRefusedError("preprocess", f"{name} = {record[name]}, allowed three numbers")
    try:
        preprocess = Preprocess.from_dict(record)
    except UserError as error:
        raise UpdateRefusedError("preprocess", f"{error.got}, allowed {error.allowed}") from error
    if preprocess.digest() != plan.preprocess_sha256:
        raise UpdateRefusedError(
            "preprocess",
            f"the record of {plan.variant} has hash {preprocess.digest()[:12]}…, "
            f"the release says {plan.preprocess_sha256[:12]}…",
        )
    return preprocess


def _require_fields(what: Any, record: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    wrong = set(record) ^ set(kinds) or {name for name in kinds if type(record[name]) is not kinds[name]}
    if wrong:
        raise UpdateRefusedError(
            what, f"{what} record {dict(record)}: look at {sorted(wrong)}; allowed exactly {sorted(kinds)}"
        )
