"""The only folder that imports private parts of torch, with what differs between the versions (2.11 - 2.13)."""

from .export import (
    checkpoints_as,
    data_sources,
    data_symbols,
    decided_by_values,
    draft_export,
    draft_failures,
    module_stack,
    quiet_export,
    recorded_guards,
    recorded_inference,
    recorded_regions,
    undecided,
    vmapped,
)
from .fake import (
    FakeTensor,
    FakeTensorMode,
    fake,
    fake_mode,
    mode_of,
    read_shape_env,
    shape_env,
    told_by_data,
    without_torch_functions,
)
from .operators import (
    HigherOrderOperator,
    OpOverloadPacket,
    c10d_ops,
    operator,
    operators_named,
    sym_size,
    wraps_tensors,
)
from .running import (
    VARIANTS,
    IncompatibleKeys,
    after_backward,
    below_autograd,
    by_default,
    compile_whole,
    flat_mesh,
    graph_task,
    group_timeout,
    has_symmetric_memory,
    like_dtensor,
    local_of,
    operator_handlers,
    replicate,
    use_symmetric_memory,
)
from .trees import (
    TreeSpec,
    is_node,
    know_records,
    named_leaves,
    register_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "FakeTensor", "FakeTensorMode", "HigherOrderOperator", "IncompatibleKeys", "OpOverloadPacket", "TreeSpec",
    "VARIANTS", "after_backward", "below_autograd", "by_default", "c10d_ops", "checkpoints_as", "compile_whole",
    "data_sources", "data_symbols", "decided_by_values", "draft_export", "draft_failures", "fake", "fake_mode",
    "flat_mesh", "graph_task", "group_timeout", "has_symmetric_memory", "is_node", "know_records", "like_dtensor",
    "local_of", "mode_of", "module_stack", "named_leaves", "operator", "operator_handlers", "operators_named",
    "quiet_export", "read_shape_env", "recorded_guards", "recorded_inference", "recorded_regions", "register_node",
    "replicate", "shape_env", "sym_size", "told_by_data", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only",
    "tree_unflatten", "undecided", "use_symmetric_memory", "vmapped", "without_torch_functions", "wraps_tensors",
]  # fmt: skip
