"""Metrics of a run, sent to TensorBoard, MLflow and Weights & Biases beside the training loop.

`Reporter` is the user's object. Each service has a thread and a bounded queue of its own
(`delivery.py`), so that a service which is down, slow or full neither stops nor slows the loop. An
adapter (`to_<service>.py`) is a `ReportWriter` on the service's own package, which is imported
where a Reporter names the service.
"""

from onward.reporting.reporter import Reporter
from onward.reporting.services import SERVICES, reported_to

__all__ = ["SERVICES", "Reporter", "reported_to"]
