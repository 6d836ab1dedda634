"""The cases are a package beside this file, which the tests and their workers import by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
