"""A monitor of training, around any loop."""

from thunder_norm.modular.monitoring.monitor import TrainingMonitor

__all__ = ["TrainingMonitor"]
