"""Every fault to plant, of all parts; a part's stand in a file of their own."""

from __future__ import annotations

from fault import Fault
from faults_autocast import AUTOCAST_FAULTS
from faults_cache import CACHE_FAULTS
from faults_capture import CAPTURE_FAULTS
from faults_entrances import ENTRANCE_FAULTS
from faults_experts import EXPERTS_FAULTS
from faults_facts import FACTS_FAULTS
from faults_files import FILES_FAULTS
from faults_gpu import GPU_FAULTS
from faults_graph import GRAPH_FAULTS
from faults_halves import HALVES_FAULTS
from faults_kernels import KERNELS_FAULTS
from faults_module import MODULE_FAULTS
from faults_pipeline import PIPELINE_FAULTS
from faults_plan import PLAN_FAULTS
from faults_precision import PRECISION_FAULTS
from faults_ranks import RANKS_FAULTS
from faults_regions import REGION_FAULTS
from faults_reporting import REPORTING_FAULTS
from faults_rings import RINGS_FAULTS
from faults_simulate import SIMULATE_FAULTS
from faults_tensor import TENSOR_FAULTS
from faults_train import TRAIN_FAULTS

FAULTS = (
    *GRAPH_FAULTS,
    *KERNELS_FAULTS,
    *GPU_FAULTS,
    *PLAN_FAULTS,
    *HALVES_FAULTS,
    *MODULE_FAULTS,
    *REGION_FAULTS,
    *CAPTURE_FAULTS,
    *EXPERTS_FAULTS,
    *TRAIN_FAULTS,
    *CACHE_FAULTS,
    *AUTOCAST_FAULTS,
    *PRECISION_FAULTS,
    *FACTS_FAULTS,
    *REPORTING_FAULTS,
    *FILES_FAULTS,
    *RANKS_FAULTS,
    *RINGS_FAULTS,
    *TENSOR_FAULTS,
    *PIPELINE_FAULTS,
    *SIMULATE_FAULTS,
    *ENTRANCE_FAULTS,
)

__all__ = ["FAULTS", "Fault"]
