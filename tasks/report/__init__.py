"""The release report: one self-contained HTML file a reviewer decides from."""

from tasks.report.write import write_report as write_report
