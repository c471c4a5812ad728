"""One directory a promise: each row of the issue "exactly eager's answers" has a file of tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `from exactly import same`
