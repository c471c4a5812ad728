"""On-the-fly operation batching for PyTorch.

Write the code for one example. Inside ``with batch():`` its ops are captured. When the block ends,
the ops run as a few batched calls. Values and gradients match eager mode::

    import torch_autobatch as ab

    with ab.batch():
        losses = [loss_fn(model, x) for x in minibatch]
    torch.stack(losses).sum().backward()
"""

from torch_autobatch._build_info import TORCH_VERSION as _built_with
from torch_autobatch._version_check import check as _check

_check(_built_with)

import torch  # noqa: E402, F401  (loads the libraries that _C is linked to)

from torch_autobatch import _log  # noqa: E402
from torch_autobatch._blocks import is_pending, last_report  # noqa: E402
from torch_autobatch._C import __version__ as __version__  # noqa: E402
from torch_autobatch._C import empty_cache, policy_names  # noqa: E402
from torch_autobatch._cell import cell  # noqa: E402
from torch_autobatch._engine import Engine, serve  # noqa: E402
from torch_autobatch._engine_request import QueueFull, generator  # noqa: E402
from torch_autobatch._fiber_state import register_fiber_state  # noqa: E402
from torch_autobatch._leave_to_python import (  # noqa: E402
    leave_package_to_python as _leave_package_to_python,
)
from torch_autobatch._map import map as map  # noqa: E402
from torch_autobatch._report import Report  # noqa: E402
from torch_autobatch._scope import batch, eager  # noqa: E402
from torch_autobatch._streams import watch as _watch_streams  # noqa: E402

_leave_package_to_python()
_watch_streams()

_log.set_up()

# `map` is not listed, so that `import *` does not shadow the builtin.
__all__ = [
    "Engine",
    "QueueFull",
    "Report",
    "batch",
    "cell",
    "eager",
    "empty_cache",
    "generator",
    "is_pending",
    "last_report",
    "policy_names",
    "register_fiber_state",
    "serve",
]
