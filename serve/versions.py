"""Which versions of SGLang the plugin was tested with."""

from collections.abc import Mapping

TESTED_SGLANG = ("0.5.23",)
ANY_SGLANG = "DOMINO_KIT_ANY_SGLANG"


def check_version(installed: str, environ: Mapping[str, str]) -> str | None:
    """The complaint about an untested SGLang, or ``None``; ``DOMINO_KIT_ANY_SGLANG=1`` allows all."""
    if installed in TESTED_SGLANG or environ.get(ANY_SGLANG) == "1":
        return None
    return (
        f"domino-kit was tested with SGLang {', '.join(TESTED_SGLANG)}, but {installed} is "
        f"installed; install a tested version, or set {ANY_SGLANG}=1 to try this one."
    )
