"""Tests that apply only to the CPU, and are skipped on an accelerator, by regular expression."""

from __future__ import annotations

import os
import re

# For each reason: regular expressions that match the node ids of the tests.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "the device has dense tensors only": (
        r"kind_of_tensor\[(sparse|quantised|nested|mkldnn)",
        r"nested",
        r"sparse",
        r"quantised",
    ),
    "it is about autocast on the CPU": (r"test_autocast", r"test_context_autocast"),
    "an accelerator's kernel computes h' and c' in one node": (
        r"test_cell_state\[(gradient_of_cell_state|hooks_of_cell_state|second_derivative)",
        r"test_a_result_that_another_is_computed_from_under_autocast",
    ),
    "it is about loops of ours that the CPU has": (
        r"test_elementwise_fusion.py::test_(the_pass_adds_the_bias|gates_are_one_pass)",
    ),
    "PyTorch's compiler has no backend for it": (r"compile",),
    "PyTorch refuses it there": (
        r"data_of_an_inference_tensor",
        r"test_read(_after_the_block|_is_reported_with_line_and_reason)?\[dlpack",
    ),
    "the default device is set by a torch function mode, in which numbers are made at once": (
        r"test_different_numbers_are_one_batch",
    ),
    "attention has no fused kernel there": (r"test_attention_does_not_read_what_was_written_to",),
    "tolist() copies to the host first, which is an op that isn't captured": (
        r"test_what_is_held_stays_pending\[<lambda>1",
    ),
    "cpu() is a read there": (r"test_read_that_needs_no_value\[cpu\]",),
    "it measures memory of the host": (r"test_lasting", r"test_memory_of_what_nobody_looks_at"),
    "a tensor from NumPy lies on the host": (
        r"a tensor that is not PyTorch's",
        r"test_what_counts_by_a_size\[numpy\]",
        r"-numpy-|\[numpy",
    ),
    "its own file makes the tensors (default.py), which a reason names": (
        r"test_writes_run_op_by_op",
    ),
    "a forked process has no accelerator": (
        r"data_?loader",
        r"test_failure_fork_with_a_pending_graph\[backward",
    ),
    "the device alone sees an index that is out of range, when it reads it": (r"\[index_range",),
}

# Additional tests that are skipped, by device.
LEFT_OUT_ON: dict[str, dict[str, tuple[str, ...]]] = {
    "sim": {"DLPack does not know the device": (r"\[(torch|np)\.from_dlpack",)},
    "cuda": {
        "an index out of range is an assertion of the kernel, after which CUDA fails": (
            r"test_failure_at_flush_has_eagers_type\[(embedding|index_select|gather|nll_loss)",
            r"test_a_failure_among_what_is_read",
            r"test_an_error_within_is_the_members_own",
        ),
        "the samples lie on the CPU, which eager refuses by an error of its own": (
            r"test_module\[nn\.(Lazy)?Conv3d-",
        ),
        "NumPy takes no memory of the device": (r"\[np\.from_dlpack",),
        "CUDA has no fused kernel for it in single precision": (
            r"test_attention_follows_its_settings",
        ),
    },
}


def reason(nodeid: str) -> str | None:
    """Returns why the test is skipped, or None if it runs."""
    device = os.environ.get("AUTOBATCH_TEST_DEVICE", "sim")
    for why, patterns in (LEFT_OUT | LEFT_OUT_ON.get(device, {})).items():
        if any(re.search(pattern, nodeid) for pattern in patterns):
            return why
    return None
