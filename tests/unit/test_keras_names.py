"""`unidist.keras`: the names for Keras users, which cost no import of Keras until they are used."""

import subprocess
import sys

CODE = """
import sys
import unidist, unidist.keras
assert unidist.keras is sys.modules["unidist.keras"] and dir(unidist.keras) == ["LearningRateWarmup"]
assert not {"keras", "torch", "tensorflow", "numpy"} & set(sys.modules), "a framework was imported"
try:
    unidist.keras.NoSuchName
except AttributeError as error:
    assert "LearningRateWarmup" in str(error)
else:
    raise AssertionError
import unidist as fresh
del fresh.keras
assert fresh.keras.__name__ == "unidist.keras"
"""


def test_nothing_is_imported_before_it_is_used():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
