"""``norm_report`` and its views."""
