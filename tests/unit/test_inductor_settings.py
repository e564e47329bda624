"""Which settings of Inductor are switched off for graphs with planned collectives, and which may stay."""

import re

from torch._inductor import config

from fsdp_compile.passes._torch import switched_off

ABOUT_COLLECTIVES = re.compile(r"overlap|reorder|bucket|comm(?!ent)|collective|contention|prefetch|fsdp|ddp|^aten_dist")

LEFT_ALONE = {
    # before our passes, which read and order the graph afterwards
    r"reorder_for_locality(_in_training)?",
    # how a pass works that is switched off
    r"reorder_(for_compute_comm_overlap_passes|prefetch_limit|for_peak_memory_debug)",
    r"bucket_\w+_fx_bucket_size_determinator|bucket_\w+_bucket_mode",
    r"_fuse_ddp_bucket_size|_fuse_ddp_communication_passes|_collective\.one_shot_all_reduce_threshold_bytes",
    r"aten_distributed_optimizations\.(collective_bucketing|insert_overlap_deps|max_\w+|compute_overlap_multipler|"
    r"custom_runtime_estimation|\w+_estimator|profile_guided_estimations_profile_path|bucket_exposed_first|bucket_mode|"
    r"log_final_collectives_estimations|bucket_only_internode_comms|enable_fusion_regions|spmd_mismatch|"
    r"prioritize_bucketing_during_scheduling|overlap_scheduling_autofix_cycles|low_contention_\w+|pre_bucketing_\w+)",
    # compares graphs among ranks, and only for overlap scheduling
    r"aten_distributed_optimizations\.spmd_check",
    # for CUDA graphs, which graphs with collectives cannot have
    r"triton\.reorder_for_reducing_graph_partitions",
    # about kernels: their choice, fusion and atomics
    r"collective_benchmark_(nruns|timeout)|min_overlap_ratio|partitioned_scatter_min_contention_ratio",
    r"always_complex_memory_overlap_TESTING_ONLY|test_configs\.assume_bucketing_reduces_latency",
}


def test_every_setting_about_collectives_is_known() -> None:
    """Torch has no setting whose name is about collectives and that nobody has judged: read what a new one does."""
    about = [name for name in config._config if ABOUT_COLLECTIVES.search(name) and name not in switched_off()]
    assert [name for name in about if not any(re.fullmatch(known, name) for known in LEFT_ALONE)] == []
    assert {"reorder_for_peak_memory", "bucket_all_gathers_fx"} <= set(switched_off())
