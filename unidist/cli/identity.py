"""Whether the imported `unidist` is this project's: another one on PyPI has the same import name."""

import importlib.metadata
import pathlib

from unidist.errors import LaunchError


def check_not_modin() -> None:
    """Raise LaunchError when Modin's execution layer, whose distribution is `unidist`, is installed over or beside this one."""
    import unidist

    theirs = pathlib.Path(unidist.__file__ or "").parent / "core"
    installed = any(d.metadata["Name"] == "unidist" for d in importlib.metadata.distributions(name="unidist"))
    if theirs.is_dir() or installed:
        raise LaunchError(
            "the distribution 'unidist' (Modin's execution layer) is installed, whose files share a folder with those of "
            "'unidist-train'; pip uninstall unidist unidist-train, then pip install unidist-train"
        )
