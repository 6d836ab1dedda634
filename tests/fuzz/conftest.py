"""The modules beside this file are imported by the tests and by the ranks of their jobs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
