"""Asking NVML: an answer, or None and the reason why there is none."""

from __future__ import annotations

from typing import Any

from unidist.hardware.records import text


class Questions:
    """Questions about one thing. unknown: the name of what was asked for to the reason why it is not known; codes: NVML's number."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.unknown: dict[str, str] = {}
        self.codes: dict[str, int | None] = {}
        # Old drivers miss functions, which the binding reports by an error of another kind.
        self._errors = (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))

    def ask(self, function: str, *names: str, arguments: tuple[Any, ...] = ()) -> Any:
        """The answer of `pynvml.function(*arguments)`; None when there is none, with the reason under each of `names`."""
        call = getattr(self.nvml, function, None)
        if call is None:
            return self._none(names, f"the installed pynvml has no {function}: pip install -U nvidia-ml-py")
        try:
            return call(*arguments)
        except UnicodeDecodeError as error:
            return error.object  # the bytes that the binding took for UTF-8
        except self._errors as error:
            code = getattr(error, "value", None)
            old = ", which this driver is too old for" if code == self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND else ""
            return self._none(names, _words(error) + old, code)

    def not_supported(self, name: str) -> bool:
        """Whether that was refused because this card or this driver has no such thing; the reason is then dropped."""
        nvml = self.nvml
        lacking = self.codes.get(name) in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if lacking:
            self.unknown.pop(name, None)
        return lacking

    def _none(self, names: tuple[str, ...], reason: str, code: int | None = None) -> None:
        for name in names:
            self.unknown[name] = reason
            self.codes[name] = code


def _words(error: Exception) -> str:
    """NVML's own description, which some libraries give in bytes that are no UTF-8."""
    try:
        return text(str(error))
    except UnicodeDecodeError as undecodable:
        return text(undecodable.object)
