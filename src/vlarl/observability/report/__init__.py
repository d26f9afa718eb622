"""The report of a run: report.html, and an image for a README."""

from vlarl.observability.report.charts import Line, curve_svg
from vlarl.observability.report.page import write_report
from vlarl.observability.report.readme_image import write_comparison, write_curve

__all__ = ["Line", "curve_svg", "write_comparison", "write_curve", "write_report"]
