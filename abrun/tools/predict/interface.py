"""Functions that `abrun launch` and `abrun memory-profile` call."""

from abrun.tools.predict.auto import resolve_auto
from abrun.tools.predict.peaks import describe_predicted_memory, predict_recipe, resolve_device_memory
from abrun.tools.predict.show import make_prediction_table

__all__ = [
    "describe_predicted_memory",
    "make_prediction_table",
    "predict_recipe",
    "resolve_auto",
    "resolve_device_memory",
]
