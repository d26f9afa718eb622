"""The report of a run: report.html, and a picture for a README."""

from vlarl.observability.report.charts import curve_svg
from vlarl.observability.report.page import write_report
from vlarl.observability.report.picture import write_curve

__all__ = ["curve_svg", "write_curve", "write_report"]
