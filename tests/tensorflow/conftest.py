"""These files compute with TensorFlow in the test process, and torch must never be imported after TensorFlow.

`tests/unit/test_tensorflow_apart.py` runs each of them in a process of its own; a run of the whole suite leaves them out here.
"""

import os

if os.environ.get("UNIDIST_TEST_APART") != "1":
    collect_ignore_glob = ["test_*.py"]
