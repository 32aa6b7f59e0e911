"""Predictions and explanations of whole corpora: folders of tables, several processes, Ray Data."""

from vecroute.corpora.clusters import ray_predict
from vecroute.corpora.folders import Report, explain_folder, predict_folder
from vecroute.corpora.streams import predict_rows

__all__ = ["Report", "explain_folder", "predict_folder", "predict_rows", "ray_predict"]
